"""The probe, the doctor and the planner on whole machines, which the emulated cards' NVML answers for."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from dsplan.diagnostics.doctor.finding import Finding
from dsplan.diagnostics.doctor.machine import check_gpus
from hardware_db.probe import GpuProcess, Machine, probe_hardware
from hardware_db.units import GIB, MIB
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.search.request import WorkOptions, make_request
from planner.search.search import recommend
from strategies.telemetry.machine import GpuReader
from tests.hardware_db.probe.nvml_player import emulating


def _probe(name: str, folder: Path) -> Machine:
    with emulating(name, folder):
        return probe_hardware()


def _worst(machine: Machine) -> Finding:
    return max(check_gpus(machine), key=lambda finding: ("ok", "warning", "problem").index(finding.level))


def test_eight_equal_cards_are_one_node_over_nvlink(tmp_path: Path) -> None:
    machine = _probe("8xa100", tmp_path)
    assert (len(machine.usable_gpus), machine.messages) == (8, ())
    assert {gpu.nvlink_links for gpu in machine.gpus} == {12}
    cluster = resolve_cluster(HardwareRequest(), machine)
    assert (cluster.device.name, cluster.gpus, cluster.assumed) == ("A100-SXM4-80GB", 8, "")
    assert _worst(machine).message == "8 of 8 GPUs usable: NVIDIA A100-SXM4-80GB"


def test_a_card_in_slices_is_planned_as_its_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _probe("mig", tmp_path)
    assert [(part.multiprocessors, (part.free_bytes or 0) // MIB) for part in machine.gpus[0].mig_devices] == [
        (16, 9969),
        (60, 40428),
    ]
    assert resolve_cluster(HardwareRequest(), machine).device.name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    request = make_request(find_model("llama-3-8b"), resolve_cluster(HardwareRequest(), machine), WorkOptions())
    changes = [remedy.change for remedy in recommend(request).remedies]
    assert changes
    assert not [change for change in changes if "GPUs instead of" in change]  # slices do not work together
    assert check_gpus(machine)[-1].message == (
        "0 of 1 GPUs usable: one rank trains on the slice NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-00000000-0000-0000-0000-000000000001")
    shown = _probe("mig", tmp_path)
    assert resolve_cluster(HardwareRequest(), shown).device.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def test_every_rank_is_planned_for_the_card_that_is_half_used(tmp_path: Path) -> None:
    machine = _probe("half_used", tmp_path)
    assert machine.gpus[0].processes == (GpuProcess(pid=41234, used_bytes=40 * GIB),)
    cluster = resolve_cluster(HardwareRequest(), machine)
    assert cluster.capacity_bytes == machine.gpus[0].free_bytes
    assert "GPU 0 has only 39.1 GiB free (process 41234 holds 40.0 GiB)" in cluster.assumed


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("hot", "warning", "GPU 1 is held back by hardware slowdown, hardware thermal slowdown"),
        ("ecc", "problem", "GPU 0 has 2 uncorrected memory errors"),
        ("two_kinds", "warning", "GPUs cannot copy to each other directly: 0-1 (chipset not supported)"),
        ("no_nvml", "problem", "a CUDA driver is here without its NVML (libnvidia-ml.so.1), which lists the GPUs"),
    ],
)
def test_the_doctor_names_what_is_wrong_with_cards(name: str, level: str, message: str, tmp_path: Path) -> None:
    worst = _worst(_probe(name, tmp_path))
    assert (worst.level, worst.message) == (level, message)
    assert worst.remedy


def test_two_kinds_are_planned_as_the_slower(tmp_path: Path) -> None:
    cluster = resolve_cluster(HardwareRequest(), _probe("two_kinds", tmp_path))
    assert (cluster.gpus, cluster.device.name) == (2, "RTX-3090")
    assert "the GPUs differ (1 x NVIDIA GeForce RTX 3090, 1 x NVIDIA GeForce RTX 4090)" in cluster.assumed


def test_a_driver_without_nvml_is_said_where_another_machine_is_assumed(tmp_path: Path) -> None:
    assumed = resolve_cluster(HardwareRequest(), _probe("no_nvml", tmp_path)).assumed
    assert assumed.startswith("a CUDA driver is here without its NVML (libnvidia-ml.so.1)")


def test_processes_that_hold_a_card_are_seen(tmp_path: Path) -> None:
    """As the emulated allocator writes it: a file by process, a number per card, one more than the bytes."""
    (tmp_path / "use").mkdir()
    (tmp_path / "use" / f"{os.getpid()}").write_bytes(struct.pack("16Q", 0, 3 * GIB + 1, *([0] * 14)))
    (tmp_path / "use" / f"{2**22 + 1}").write_bytes(struct.pack("16Q", *([GIB + 1] * 16)))  # no such process
    first, second, *_ = _probe("8xa100", tmp_path).gpus
    assert (first.used_bytes, first.processes) == (0, ())
    assert (second.used_bytes, second.processes) == (3 * GIB, (GpuProcess(pid=os.getpid(), used_bytes=3 * GIB),))


def test_a_rank_on_a_slice_has_figures_of_it(tmp_path: Path) -> None:
    """torch writes the UUIDs of cards and of slices alike, and NVML knows a slice by another name."""
    with emulating("mig", tmp_path):
        figures = GpuReader("00000000-0000-0000-0000-000000000003").read()
    assert figures == {"gpu_memory_used_bytes": 20 * MIB}


def test_a_hot_card_reports_that_it_is_throttled(tmp_path: Path) -> None:
    with emulating("hot", tmp_path):
        figures = GpuReader("00000001-0000-0000-0000-000000000000").read()
    assert (figures["gpu_throttled"], figures["gpu_temperature_celsius"]) == (True, 91)
