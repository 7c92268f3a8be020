"""The catalogues of devices, links and node types: complete, strict, fresh, fast, found by the names people type."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from hardware_db.datasheets import devices, find_device, find_link, find_node_type, links, loader, node_types, sources
from hardware_db.datasheets.compile import compile_devices, compile_interconnects
from hardware_db.errors import BrokenFile, UnknownName
from hardware_db.units import MIB
from scripts.generate.catalogues import stale

DATA = Path("hardware_db/datasheets")


def test_every_row_is_there() -> None:
    assert (len(devices()), len(links()), len(node_types())) == (86, 53, 144)


def test_compiled_catalogues_are_fresh() -> None:
    assert [str(path) for path in stale()] == [], "run scripts/generate/catalogues.py"


def test_every_cited_source_is_explained() -> None:
    cited = {key for row in (*devices(), *links(), *node_types()) for keys in row.source.values() for key in keys}
    assert cited <= set(sources())


def test_every_node_type_names_a_device_and_links_of_the_catalogue() -> None:
    for node in node_types():
        assert find_device(node.gpu).name == node.gpu
        for link in (node.intra_link, node.inter_link):
            assert link is None or find_link(link).name == link


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a100", "A100-SXM4-80GB"),
        ("A100-40", "A100-SXM4-40GB"),
        ("a100-80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("h100", "H100-SXM5-80GB"),
        ("RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("nvidia geforce rtx 4090", "RTX-4090"),
        ("v100", "V100-SXM2-16GB"),
        ("v100-32", "V100-SXM2-32GB"),
        ("Tesla T4", "T4"),
        ("l4", "L4"),
        ("mi300x", "MI300X"),
        ("mi250x", "MI250X-GCD"),
        ("gb200", "GB200-186GB"),
        ("3090ti", "RTX-3090-Ti"),
    ],
)
def test_devices_answer_to_the_names_people_type(spelling: str, name: str) -> None:
    assert find_device(spelling).name == name


def test_a_device_carries_its_figures_in_our_units() -> None:
    device = find_device("A100-SXM4-80GB")
    assert device.total_bytes == 81920 * MIB
    assert device.peak_flops("bf16") == 312e12
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(2039e9)
    assert device.source["tflops"]


def test_an_unknown_gpu_offers_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match=r"unknown GPU 'a1000'; nearest: A100") as raised:
        find_device("a1000")
    assert "\n" not in str(raised.value)


def edited(tmp_path: Path, name: str, old: str, new: str) -> Path:
    text = (DATA / name).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  tdp_watts: 300", "  tpd_watts: 300", r"row 'P100-SXM2-16GB' has unknown key 'tpd_watts'; keys are name"),
        ("  tdp_watts: 300", "  tdp_watts: lots", r"key 'tdp_watts' is 'lots'; write a number or null"),
        ("  tdp_watts: 300", "  tdp_watts: -300", r"key 'tdp_watts' is -300"),
        ("  vendor: nvidia", "  vendor: null", r"row 'P100-SXM2-16GB' lacks 'vendor'"),
        ("    tdp: [REC]", "    tdp: []", r"gives no source for 'tdp'"),
        ("    tdp: [REC]", "    tdp: [XYZ]", r"cites 'XYZ' for 'tdp'"),
        ("aliases: [Tesla P100-PCIE-16GB,", "aliases: [P100-SXM2,", r"both answer to 'P100-SXM2'"),
        ("- name: P100-SXM2-16GB", "- nmae: P100-SXM2-16GB", r"row 0 has no name"),
        ("sources:", "sauces:", r"the top level must be devices, sources"),
        ("devices:\n", "devices: [\n", r"is not YAML"),
    ],
)
def test_a_broken_catalogue_names_file_row_key_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = edited(tmp_path, "devices.yaml", old, new)
    with pytest.raises(BrokenFile, match=message) as raised:
        compile_devices(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_node_type_cannot_name_a_link_that_is_not_there(tmp_path: Path) -> None:
    path = edited(tmp_path, "interconnects.yaml", "inter_link: eth-10", "inter_link: eth-11")
    with pytest.raises(BrokenFile, match="names no link: 'eth-11'"):
        compile_interconnects(path)


def test_finding_one_device_reads_one_compiled_file_once_and_builds_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, rows = Mock(wraps=loader.read_compiled), Mock(wraps=loader._build)
    monkeypatch.setattr(loader, "read_compiled", reads)
    monkeypatch.setattr(loader, "_build", rows)
    loader._devices.cache_clear()
    for _ in range(2):
        find_device("h100")
    assert [path.name for (path,), _ in reads.call_args_list] == ["devices.json"]
    assert rows.call_count == 2


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100-40G", "A100-SXM4-40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_vendors_and_gigabytes_are_written_in_several_ways(name: str, device: str) -> None:
    assert find_device(name).name == device


def test_a_name_that_is_a_word_of_others_is_none_that_looks_alike() -> None:
    with pytest.raises(UnknownName) as caught:
        find_device("M2")
    assert "Apple-M2-Ultra" in caught.value.near
    assert not any(name.startswith("MI") for name in caught.value.near)


@pytest.mark.parametrize("name", ["hgx-h800", "gb200-nvl72", "8x3090", "4x4090", "mi300x", "lambda-8xh100"])
def test_boxes_that_people_have_are_there(name: str) -> None:
    assert find_node_type(name).gpus_per_node in (4, 8)
