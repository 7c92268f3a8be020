"""The catalogue link that joins the GPUs of a node."""

from __future__ import annotations

import pytest

from hardware_db.datasheets import devices, find_device
from hardware_db.probe import Gpu, GpuPair
from hardware_db.probe.as_device import gpu_device, mig_device
from hardware_db.probe.machine import MigDevice
from hardware_db.topology import default_link, link_between, pcie
from hardware_db.units import GIB, MIB


def gpus(count: int, **facts: object) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=index, name="gpu", **facts) for index in range(count))  # type: ignore[arg-type]


def pairs(count: int, *, p2p: str = "ok", nvlink: bool = False) -> tuple[GpuPair, ...]:
    every = ((first, second) for second in range(count) for first in range(second))
    return tuple(GpuPair(first=first, second=second, p2p=p2p, nvlink=nvlink) for first, second in every)


def name_of(device: str, cards: tuple[Gpu, ...], joined: tuple[GpuPair, ...]) -> str | None:
    link = link_between(find_device(device), cards, joined)
    return None if link is None else link.name


@pytest.mark.parametrize(
    ("device", "count", "links", "to_switch", "expected"),
    [
        ("h100", 8, 18, True, "nvlink4-h100"),
        ("h200", 8, 18, True, "nvlink4-h200"),
        ("a100", 8, 12, True, "nvlink3-a100"),
        ("v100", 8, 6, False, "nvlink2-v100-dgx1"),
        ("b200", 8, 18, True, "nvlink5-b200"),
        ("h800", 8, 8, True, "nvlink4-h800"),
        ("3090", 2, 4, False, "nvlink3-bridge-ampere"),
        ("A100-PCIE-80GB", 2, 12, False, "nvlink3-bridge-a100-pcie"),
        ("h100-nvl", 2, 12, False, "nvlink4-bridge-h100"),
        ("2080ti", 2, 2, False, "nvlink2-bridge-turing"),
    ],
)
def test_nvlink_where_all_pairs_have_it(device: str, count: int, links: int, to_switch: bool, expected: str) -> None:
    cards = gpus(count, nvlink_links=links, nvlink_to_switch=to_switch)
    assert name_of(device, cards, pairs(count, nvlink=True)) == expected


def test_fewer_active_links_are_a_slower_link() -> None:
    cards = gpus(8, nvlink_links=8, nvlink_to_switch=True)
    assert name_of("h100", cards, pairs(8, nvlink=True)) == "nvlink4-h800"


def test_cards_bridged_two_by_two_are_joined_by_pcie() -> None:
    joined = tuple(
        GpuPair(first=pair.first, second=pair.second, p2p="ok", nvlink=(pair.first, pair.second) in {(0, 1), (2, 3)})
        for pair in pairs(4)
    )
    cards = gpus(4, nvlink_links=4, nvlink_to_switch=False, pcie_generation_max=4, pcie_width=16)
    assert name_of("3090", cards, joined) == "pcie4-x16"


@pytest.mark.parametrize(
    ("p2p", "generation", "width", "expected"),
    [
        ("ok", 4, 16, "pcie4-x16"),
        ("ok", 3, 8, "pcie3-x8"),
        ("ok", 4, 4, "pcie4-x8"),
        ("ok", 5, None, "pcie5-x16"),
        ("chipset not supported", 4, 16, "pcie-host-staged"),
    ],
)
def test_pcie_of_the_slot_or_host_memory_without_p2p(
    p2p: str, generation: int, width: int | None, expected: str
) -> None:
    cards = gpus(2, pcie_generation_max=generation, pcie_width=width)
    assert name_of("l40s", cards, pairs(2, p2p=p2p)) == expected


def test_one_gpu_has_no_link() -> None:
    assert link_between(find_device("h100"), gpus(1), ()) is None
    assert default_link(find_device("h100"), 1) is None


def test_a_pcie_generation_outside_the_catalogue_has_no_link() -> None:
    assert pcie(9, 16) is None
    assert pcie(None, 16) is None


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("a100", "nvlink3-a100"),
        ("A100-PCIE-40GB", "pcie4-x16"),
        ("3090", "pcie-host-staged"),
        ("RTX-3090-Ti", "pcie-host-staged"),
        ("4080", "pcie-host-staged"),
        ("rtx a5000", "pcie4-x16"),
        ("a800", "nvlink3-a800"),
        ("h20", "nvlink4-h100"),
        ("mi300x", "xgmi-mi300x"),
        ("mi325x", "xgmi-mi300x"),
        ("gb300", "nvlink5-gb200-nvl72"),
        ("gaudi3", "gaudi3-roce"),
        ("max-1550", "pcie5-x16"),
        ("p100-sxm2", "nvlink1-p100"),
    ],
)
def test_the_usual_link_of_a_device(device: str, expected: str) -> None:
    link = default_link(find_device(device), 8)
    assert link is not None
    assert link.name == expected


def test_every_card_and_module_has_a_usual_link() -> None:
    assert [device.name for device in devices() if device.form != "SoC" and default_link(device, 8) is None] == []


def test_a_probed_gpu_takes_its_datasheet_and_its_own_memory() -> None:
    device = gpu_device(Gpu(index=0, name="NVIDIA GeForce RTX 3080", total_bytes=12 * GIB))
    assert device.name == "RTX-3080"
    assert device.total_bytes == 12 * GIB
    exact = gpu_device(Gpu(index=0, name="NVIDIA H100 80GB HBM3", total_bytes=81559 * MIB))
    assert exact == find_device("h100")


def test_a_gpu_without_datasheet_is_derived_from_cores_clocks_and_bus() -> None:
    """The same arithmetic on an RTX 4090's figures gives what its datasheet says: 82.6 TFLOP/s and 1,008 GB/s."""
    card = Gpu(
        index=0,
        name="NVIDIA Example 1",
        compute_capability="8.9",
        total_bytes=24564 * MIB,
        cuda_cores=16384,
        sm_clock_max_mhz=2520,
        memory_bus_bits=384,
        memory_clock_max_mhz=10501,
    )
    device = gpu_device(card)
    datasheet = find_device("4090")
    assert device.peak_flops("fp32") == pytest.approx(datasheet.peak_flops("fp32"), rel=0.01)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(datasheet.memory_bandwidth_bytes_per_s, rel=0.01)
    assert device.supports_bf16
    assert device.note is not None


def test_a_mig_slice_has_its_share_of_the_whole() -> None:
    whole = Gpu(index=0, name="NVIDIA H100 80GB HBM3", total_bytes=81559 * MIB)
    part = mig_device(whole, MigDevice(name="MIG 1g.10gb", total_bytes=9984 * MIB, multiprocessors=16))
    datasheet = find_device("h100")
    assert part.peak_flops("bf16") == pytest.approx((datasheet.peak_flops("bf16") or 0) * 16 / 132)
    bandwidth = datasheet.memory_bandwidth_bytes_per_s or 0
    assert part.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth * 9984 / 81559)
    assert part.total_bytes == 9984 * MIB
