"""Samples of the machine while a rank trains: its GPU, processors, network and disks. No torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hardware_db.notices import notice
from hardware_db.probe.cgroup import cgroup_limits
from strategies.config.values import MonitorSettings

SAMPLE_SECONDS = 10.0
"""Between two looks at the machine; a look takes milliseconds."""
_STATM = "/proc/self/statm"


Figures = dict[str, float]


class ProcessMemory:
    """Resident bytes, and those of them that no file backs: pages of mapped data come and go as they are read.

    They are read in microseconds.
    """

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        self._process = None if os.path.exists(_STATM) else psutil.Process()
        # Kept open, which halves the time to read it; in a process that forks off it stays the parent's.
        self._file = os.open(_STATM, os.O_RDONLY) if self._process is None else -1

    def read(self) -> dict[str, int]:
        """Return `rss_bytes` and `private_bytes`; on systems without /proc both are what psutil calls rss."""
        if self._process is not None:
            resident = self._process.memory_info().rss
            return {"rss_bytes": resident, "private_bytes": resident}
        pages = os.pread(self._file, 128, 0).split()
        resident, shared = int(pages[1]) * self._page, int(pages[2]) * self._page
        return {"rss_bytes": resident, "private_bytes": resident - shared}

    def close(self) -> None:
        """Release the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


class MachineReader:
    """Reads figures by name; a rate is over the time since the last read, so the first read has none.

    `gpu_uuid` is that of the rank's GPU, None for none. Figures of the whole node are read where `whole_node`, by one
    rank of each. What cannot be read is left out.
    """

    def __init__(self, settings: MonitorSettings, *, gpu_uuid: str | None, directory: Path, whole_node: bool) -> None:
        self._settings = settings
        self._gpu = GpuReader(gpu_uuid) if settings.gpu and gpu_uuid else None
        self._directory = directory
        self._whole_node = whole_node
        self._process = psutil.Process()
        self._memory = ProcessMemory()
        self._before: Figures = {}
        self._read_at = time.monotonic()

    def read(self) -> Figures:
        """Return the figures of now."""
        figures = Figures() if self._gpu is None else self._gpu.read()
        if self._settings.cpu:
            figures |= {"cpu_percent": self._process.cpu_percent(), **self._memory.read()}
        if self._whole_node:
            figures |= self._node()
        return figures

    def _node(self) -> Figures:
        figures: Figures = {"disk_free_bytes": psutil.disk_usage(str(self._directory)).free}
        if self._settings.cpu:
            left = cgroup_limits().memory_left_bytes
            available = psutil.virtual_memory().available
            figures["host_memory_available_bytes"] = available if left is None else min(available, left)
            figures["host_cpu_percent"] = psutil.cpu_percent()
        if self._settings.network:
            figures |= self._rates()
        return figures

    def _rates(self) -> Figures:
        now, totals = time.monotonic(), _totals()
        seconds, before = now - self._read_at, self._before
        self._read_at, self._before = now, totals
        return {
            f"{name}_bytes_per_second": (total - before[name]) / seconds
            for name, total in totals.items()
            if name in before and seconds > 0
        }


def _totals() -> Figures:
    """Return bytes since the machine's start."""
    network = [counts for name, counts in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    disk = psutil.disk_io_counters()
    return {
        "network_sent": sum(counts.bytes_sent for counts in network),
        "network_received": sum(counts.bytes_recv for counts in network),
        **({} if disk is None else {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}),
    }


class GpuReader:
    """One GPU's figures from NVML; those that its driver refuses are left out, and asked for no more."""

    def __init__(self, uuid: str) -> None:
        from hardware_db.probe.nvml import driver_library_loads

        self._questions: dict[str, Callable[[], float]] = {}
        if not driver_library_loads():
            return
        try:
            import pynvml  # 40 ms; only machines with a driver pay for it
        except ImportError as problem:
            notice(f"no figures of the GPU: {problem}")
            return
        self._refusal = pynvml.NVMLError
        try:
            pynvml.nvmlInit()
            self._questions = _questions(pynvml, _handle(pynvml, uuid))
        except pynvml.NVMLError as problem:
            notice(f"no figures of the GPU: {problem}")

    def read(self) -> Figures:
        """Return the figures of now."""
        figures: Figures = {}
        for name, ask in list(self._questions.items()):
            try:
                figures[name] = ask()
            except self._refusal:
                del self._questions[name]
        return figures


def _handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU, or of a MIG slice, whose UUIDs torch writes without what tells them apart."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _questions(nvml: Any, handle: Any) -> dict[str, Callable[[], float]]:
    slowed = (
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
    )
    return {
        "gpu_utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "gpu_throttled": lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slowed),
    }


class Sampler:
    """Hands the machine's figures to `take` every `seconds`, from a thread of its own, until `close`."""

    def __init__(self, reader: MachineReader, seconds: float, take: Callable[[Figures], object]) -> None:
        self._reader, self._seconds, self._take = reader, seconds, take
        self._ends = threading.Event()
        self._lock = threading.Lock()
        # A daemon: a script that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name="dsplan-sampler", daemon=True)
        self._thread.start()

    def now(self) -> Figures:
        """Return the figures of this moment."""
        with self._lock:
            return self._reader.read()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        is_reported = False
        while not self._ends.wait(self._seconds):
            try:
                self._take(self.now())
            except (OSError, psutil.Error) as problem:  # a mount or a /proc that went away may come back
                if not is_reported:
                    notice(f"a look at the machine failed: {problem}")
                is_reported = True
