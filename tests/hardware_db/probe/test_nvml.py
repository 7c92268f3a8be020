"""The NVIDIA probe against recorded answers of the C library."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardware_db.probe import Gpu, GpuProcess, nvml, probe_hardware
from hardware_db.probe.nvml import NvmlAnswer, probe_nvidia
from hardware_db.units import GIB, MIB
from tests.hardware_db.probe.nvml_player import RECORDINGS, playing


@pytest.fixture(scope="module")
def troubled() -> NvmlAnswer:
    with playing("8xh100_troubled"):
        return probe_nvidia()


@pytest.fixture(scope="module")
def geforce() -> NvmlAnswer:
    with playing("2x4090"):
        return probe_nvidia()


def recording(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def test_a_healthy_gpu_is_read_completely(troubled: NvmlAnswer) -> None:
    total = 81559 * MIB
    assert troubled.gpus[0] == Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        compute_capability="9.0",
        total_bytes=total,
        free_bytes=total - 551 * MIB,
        used_bytes=551 * MIB,
        processes=(),
        mig_enabled=False,
        ecc_enabled=True,
        ecc_corrected_errors=0,
        ecc_uncorrected_errors=0,
        cuda_cores=16896,
        memory_bus_bits=5120,
        sm_clock_mhz=345,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        throttle_reasons=(),
        power_draw_watts=71.23,
        power_limit_watts=700.0,
        temperature_celsius=31,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        nvlink_links=18,
        nvlink_to_switch=True,
    )
    assert (troubled.driver, troubled.driver_cuda) == ("550.54.15", "12.4")


def test_other_processes_are_seen_with_what_they_hold(troubled: NvmlAnswer) -> None:
    used = troubled.gpus[2]
    assert used.processes == (GpuProcess(pid=41234, used_bytes=40 * GIB), GpuProcess(pid=41235, used_bytes=None))
    assert used.free_bytes == 81559 * MIB - 551 * MIB - 40 * GIB
    assert used.throttle_reasons == ("software power cap",)


def test_mig_slices_are_listed_and_empty_places_skipped(troubled: NvmlAnswer) -> None:
    cut = troubled.gpus[3]
    assert cut.mig_enabled
    assert not cut.usable
    assert [(part.name, part.multiprocessors) for part in cut.mig_devices] == [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16),
    ]
    assert cut.mig_devices[1].free_bytes == (9984 - 15) * MIB


def test_throttling_is_said_in_words(troubled: NvmlAnswer) -> None:
    assert troubled.gpus[5].throttle_reasons == ("hardware slowdown", "hardware thermal slowdown")


def test_a_lost_gpu_is_named_and_left_out(troubled: NvmlAnswer) -> None:
    lost = troubled.gpus[6]
    assert lost.lost
    assert not lost.usable
    assert "GPU 6 does not report its handle: the GPU has fallen off the bus; reboot the machine" in troubled.messages
    assert not [pair for pair in troubled.pairs if 6 in (pair.first, pair.second)]


def test_a_refused_question_is_none_and_one_sentence(troubled: NvmlAnswer) -> None:
    faulty = troubled.gpus[7]
    assert (faulty.power_draw_watts, faulty.power_limit_watts, faulty.nvlink_to_switch) == (None, None, None)
    assert faulty.ecc_uncorrected_errors == 2
    assert faulty.usable
    assert "GPU 7 does not report power draw: the driver answered 'unknown error'" in troubled.messages
    unsupported = "GPU 7 does not report power limit, the far end of NVLink: this GPU or driver does not support it"
    assert unsupported in troubled.messages
    assert len(troubled.messages) == 3


def test_the_topology_has_every_pair_of_answering_gpus(troubled: NvmlAnswer) -> None:
    pairs = {(pair.first, pair.second): pair for pair in troubled.pairs}
    assert len(pairs) == 21
    assert (pairs[0, 1].ancestor, pairs[4, 5].ancestor, pairs[0, 7].ancestor) == (
        "numa-node",
        "pcie-switches",
        "system",
    )
    assert (pairs[0, 1].p2p, pairs[0, 1].nvlink) == ("ok", True)
    assert (pairs[2, 3].p2p, pairs[2, 3].nvlink) == ("not supported", False)


def test_geforce_cards_lack_ecc_mig_and_nvlink_without_fuss(geforce: NvmlAnswer) -> None:
    gpu = geforce.gpus[0]
    assert (gpu.ecc_enabled, gpu.mig_enabled, gpu.nvlink_links, gpu.memory_bus_bits) == (None, False, 0, None)
    assert (gpu.pcie_generation, gpu.pcie_generation_max) == (1, 4)
    assert geforce.messages == (
        "GPU 0, 1 does not report memory bus width: this driver is too old to say",
        "GPU 0, 1 does not report ECC mode: this GPU or driver does not support it",
    )


@pytest.mark.parametrize(
    "function",
    sorted({key.split(" ")[0] for key in recording("8xh100_troubled")["common"]}),
)
@pytest.mark.parametrize("code", [3, 4, 13, 15, 999])
@pytest.mark.sweep(every=3)
def test_any_call_may_fail_without_a_traceback(function: str, code: int) -> None:
    broken = recording("8xh100_troubled")
    broken["system"]["nvmlDeviceGetCount_v2"] = 2
    broken["devices"][1][function] = {"error": code}
    for key in [key for key in broken["common"] if key.startswith(f"{function} ")]:
        broken["devices"][1][key] = {"error": code}
    with playing(broken):
        answer = probe_nvidia()
    assert len(answer.gpus) == 2
    assert answer.gpus[0].usable
    assert answer.gpus[1].lost == (code == 15)


@pytest.mark.parametrize("function", ["nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_will_not_count_is_a_sentence(function: str) -> None:
    broken = recording("2x4090")
    broken["system"][function] = {"error": 999}
    with playing(broken):
        answer = probe_nvidia()
    assert answer.messages[0].startswith("NVML does not report ")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (9, "the NVIDIA driver is installed but not loaded; load it with `modprobe nvidia`"),
        (18, "the NVIDIA driver was updated while loaded; reboot the machine"),
    ],
)
def test_a_driver_that_will_not_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch, code: int, sentence: str) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(nvml, "driver_library_loads", lambda: True)
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert probe_nvidia() == NvmlAnswer(messages=(sentence,))


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "driver_library_loads", lambda: False)
    assert probe_nvidia() == NvmlAnswer()


def test_a_missing_python_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "driver_library_loads", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert probe_nvidia().messages == (
        "an NVIDIA driver is here but nvidia-ml-py is not; run `pip install nvidia-ml-py`",
    )


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        ("0,2", [0, 2]),
        ("", []),
        ("-1", []),
        ("1,9,2", [1]),
        ("GPU-00000000-0000-0000-0000-000000000004", [4]),
        ("MIG-00000000-0000-0000-0003-000000000001", [3]),
    ],
)
def test_cuda_visible_devices_hides_gpus(monkeypatch: pytest.MonkeyPatch, setting: str, visible: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    with playing("8xh100_troubled"):
        machine = probe_hardware()
    assert [gpu.index for gpu in machine.gpus if gpu.visible] == visible


def test_uncorrected_memory_errors_are_a_sentence() -> None:
    with playing("8xh100_troubled"):
        messages = probe_hardware().messages
    assert [message for message in messages if message.startswith("GPU 7 has 2 uncorrected ECC errors")]
