"""Figures that are read of the machine, with a GPU that answers and refuses as NVML does."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from hardware_db.probe import nvml
from strategies.config.values import MonitorSettings, Threshold
from strategies.telemetry.detectors import Watch
from strategies.telemetry.machine import MachineReader, Sampler

HOT = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown


class FakeGpu:
    """Answers in the place of the driver; `refused` names functions that it does not know."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons, self.refused, self.calls = 0, set[str](), list[str]()
        monkeypatch.setattr(nvml, "driver_library_loads", lambda: True)
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        answers = {
            "nvmlDeviceGetHandleByUUID": lambda: "handle",
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=87),
            "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(used=2**30),
            "nvmlDeviceGetTemperature": lambda: 91,
            "nvmlDeviceGetPowerUsage": lambda: 300_500,
            "nvmlDeviceGetClockInfo": lambda: 1200,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self.reasons,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, lambda *_, name=name, answer=answer: self._answer(name, answer))

    def _answer(self, name: str, answer: object) -> object:
        self.calls.append(name)
        if name in self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert callable(answer)
        return answer()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def _reader(directory: Path, **settings: bool) -> MachineReader:
    return MachineReader(MonitorSettings(**settings), gpu_uuid="GPU-1", directory=directory, whole_node=False)


def test_a_gpu_is_read(tmp_path: Path, gpu: FakeGpu) -> None:
    figures = _reader(tmp_path, cpu=False).read()
    assert figures == {
        "gpu_utilization_percent": 87,
        "gpu_memory_used_bytes": 2**30,
        "gpu_temperature_celsius": 91,
        "gpu_power_watts": 300.5,
        "gpu_clock_mhz": 1200,
        "gpu_throttled": False,
    }


def test_what_a_driver_refuses_is_left_out_and_asked_no_more(tmp_path: Path, gpu: FakeGpu) -> None:
    gpu.refused.add("nvmlDeviceGetPowerUsage")
    reader = _reader(tmp_path, cpu=False)
    assert "gpu_power_watts" not in reader.read()
    assert len(reader.read()) == 5
    assert gpu.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_gpu_that_nvml_does_not_know_has_no_figures(
    tmp_path: Path, gpu: FakeGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.refused.add("nvmlDeviceGetHandleByUUID")
    assert _reader(tmp_path, cpu=False).read() == {}
    assert "no figures of the GPU: " in capsys.readouterr().err


def test_a_machine_that_cannot_be_looked_at_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, looks = _reader(tmp_path, gpu=False), threading.Semaphore(0)

    def fail() -> None:
        looks.release()
        raise OSError("no such mount")

    monkeypatch.setattr(reader, "read", fail)
    sampler = Sampler(reader, 0.01, lambda figures: None)
    assert all(looks.acquire(timeout=30) for _ in range(3)), "it looks again"
    sampler.close()
    assert capsys.readouterr().err.count("a look at the machine failed: no such mount") == 1


def test_a_gpu_that_stays_too_hot_is_reported_once(tmp_path: Path, gpu: FakeGpu) -> None:
    reader, watch = _reader(tmp_path), Watch(MonitorSettings(thresholds={}), rank=1)
    told = []
    for look in range(12):
        gpu.reasons = HOT if look != 6 else 0
        told.append([alert.kind for alert in watch.figures(reader.read())])
    assert told == [["throttled"] if look in (2, 9) else [] for look in range(12)]


def test_a_power_cap_is_not_heat(tmp_path: Path, gpu: FakeGpu) -> None:
    gpu.reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap
    assert _reader(tmp_path).read()["gpu_throttled"] is False


def test_thresholds_hold_for_the_machine(tmp_path: Path, gpu: FakeGpu) -> None:
    watch = Watch(MonitorSettings(thresholds={"gpu_temperature_celsius": Threshold(above=85)}), rank=0)
    (alert,) = watch.figures(_reader(tmp_path).read())
    assert alert.message == "gpu_temperature_celsius is 91, above its threshold 85"
    assert watch.figures(_reader(tmp_path).read()) == []
