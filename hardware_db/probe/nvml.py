"""NVIDIA GPUs through NVML. Whatever the driver refuses becomes None and one sentence, never a traceback."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import field
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

from hardware_db.probe.machine import Gpu, GpuPair, GpuProcess, MigDevice
from hardware_db.records import dataclass

# NVML's numbers as words, as nvml.h gives them: event reasons, topology levels, P2P status, nvmlReturn_t.


# Bit 0x1 (idle) is left out: an idle GPU is not held back.
THROTTLE_REASONS = {
    0x2: "clocks set by the user",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "low utilisation or reliability voltage",
}

ANCESTORS = {
    0: "internal",
    10: "pcie-switch",
    20: "pcie-switches",
    30: "host-bridge",
    40: "numa-node",
    50: "system",
}

P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled in the driver's settings",
    5: "not supported",
    6: "unknown",
}

NOT_SUPPORTED = 3
INVALID_ARGUMENT = 2
NOT_FOUND = 6
LOST = frozenset({15, 16, 28})

ERRORS = {
    3: "this GPU or driver does not support it",
    4: "this user has no permission",
    6: "there is none",
    8: "its power cables are not attached",
    10: "the driver did not answer in time",
    13: "this driver is too old to say",
    14: "its inforom is damaged",
    15: "the GPU has fallen off the bus; reboot the machine",
    16: "the GPU needs a reset; run `nvidia-smi --gpu-reset` or reboot",
    17: "the operating system refused",
    27: "the GPU is not ready",
    28: "the GPU cannot be found; reboot the machine",
    999: "the driver answered 'unknown error'",
}

INIT_ERRORS = {
    9: "the NVIDIA driver is installed but not loaded; load it with `modprobe nvidia`",
    12: "no NVIDIA driver here",
    18: "the NVIDIA driver was updated while loaded; reboot the machine",
}


def throttle_words(reasons: int) -> tuple[str, ...]:
    """Return the reasons in a bit mask as words, empty when the clocks are free."""
    return tuple(word for bit, word in THROTTLE_REASONS.items() if reasons & bit)


# Asking NVML so that every refusal becomes None and, for all the GPUs that share it, one sentence.


_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Questions:
    """Asks NVML one thing at a time about one GPU and keeps what it refused."""

    nvml: Any
    index: int
    lost: bool = False
    refusals: list[tuple[str, int]] = field(default_factory=list)

    def ask(self, what: str, call: Callable[[], _Answer], *, otherwise: _Answer | None = None) -> _Answer | None:
        """Return the answer; `otherwise` where the GPU does not support the question.

        None, noted, on any other refusal.
        """
        if self.lost:
            return None
        try:
            return call()
        except self.nvml.NVMLError as error:
            if error.value == NOT_SUPPORTED and otherwise is not None:
                return otherwise
            self.note(what, error.value)
        except self.nvml.NVMLLibraryMismatchError:
            self.refusals.append((what, 13))
        return None

    def note(self, what: str, code: int) -> None:
        """Keep a refusal; after one that means the GPU is gone nothing more is asked of it."""
        self.lost = self.lost or code in LOST
        self.refusals.append((what, code))


def sentences(answered: list[Questions]) -> tuple[str, ...]:
    """One sentence per reason and set of refused questions, for all the GPUs that share it."""
    grouped: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for questions in answered:
        by_reason: dict[int, dict[str, None]] = {}
        for what, code in questions.refusals:
            by_reason.setdefault(code, {})[what] = None
        for code, refused in by_reason.items():
            grouped.setdefault((code, tuple(refused)), []).append(questions.index)
    return tuple(_sentence(code, refused, indexes) for (code, refused), indexes in grouped.items())


def _sentence(code: int, refused: tuple[str, ...], indexes: list[int]) -> str:
    who = "NVML" if indexes == [-1] else f"GPU {', '.join(map(str, indexes))}"
    reason = ERRORS.get(code, f"NVML error {code}")
    return f"{who} does not report {', '.join(refused)}: {reason}"


# One GPU, and one pair of GPUs, as NVML describes them.


_READ, _NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t; pynvml's own constant for the first is a tuple by mistake


def read_gpu(questions: Questions, handle: Any) -> Gpu:
    """Return everything NVML reports about one GPU; `handle` is None if even that was refused."""
    nvml, ask = questions.nvml, questions.ask
    if handle is None:
        return Gpu(index=questions.index, name="unknown NVIDIA GPU", lost=True)
    name = ask("its name", lambda: nvml.nvmlDeviceGetName(handle))
    capability = ask("compute capability", lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    facts: dict[str, Any] = {
        "name": name or "unknown NVIDIA GPU",
        "uuid": ask("its UUID", lambda: nvml.nvmlDeviceGetUUID(handle)),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "cuda_cores": ask("CUDA cores", lambda: nvml.nvmlDeviceGetNumGpuCores(handle)),
        "memory_bus_bits": ask("memory bus width", lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle)),
    }
    for read in (_memory, _mig, _ecc, _clocks, _power, _pcie, _nvlink):
        facts |= read(questions, handle)
    return Gpu(index=questions.index, **facts, lost=questions.lost)


def _memory(questions: Questions, handle: Any) -> dict[str, Any]:
    memory = questions.ask("memory", lambda: questions.nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = questions.ask("its processes", lambda: questions.nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    figures: dict[str, Any] = {}
    if memory is not None:
        figures = {"total_bytes": memory.total, "free_bytes": memory.free, "used_bytes": memory.used}
    if processes is not None:
        figures["processes"] = tuple(GpuProcess(pid=item.pid, used_bytes=item.usedGpuMemory) for item in processes)
    return figures


def _mig(questions: Questions, handle: Any) -> dict[str, Any]:
    nvml = questions.nvml
    mode = questions.ask("MIG mode", lambda: nvml.nvmlDeviceGetMigMode(handle), otherwise=[0, 0])
    if mode is None:
        return {}
    slices: list[MigDevice] = []
    if mode[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        count = questions.ask("its MIG devices", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        devices = (_mig_device(questions, handle, index) for index in range(count))
        slices = [device for device in devices if device is not None]
    return {"mig_enabled": mode[0] == nvml.NVML_DEVICE_MIG_ENABLE, "mig_devices": tuple(slices)}


def _mig_device(questions: Questions, handle: Any, index: int) -> MigDevice | None:
    """Return the slice in one place, or None if the place is empty."""
    nvml = questions.nvml
    try:
        device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except nvml.NVMLError as error:
        if error.value not in (NOT_FOUND, INVALID_ARGUMENT):
            questions.note("a MIG device", error.value)
        return None
    memory = questions.ask("memory of a MIG device", lambda: nvml.nvmlDeviceGetMemoryInfo(device))
    attributes = questions.ask("size of a MIG device", lambda: nvml.nvmlDeviceGetAttributes(device))
    return MigDevice(
        name=questions.ask("name of a MIG device", lambda: nvml.nvmlDeviceGetName(device)) or f"MIG device {index}",
        uuid=questions.ask("UUID of a MIG device", lambda: nvml.nvmlDeviceGetUUID(device)),
        total_bytes=None if memory is None else memory.total,
        free_bytes=None if memory is None else memory.free,
        multiprocessors=None if attributes is None else attributes.multiprocessorCount,
    )


def _ecc(questions: Questions, handle: Any) -> dict[str, Any]:
    nvml = questions.nvml
    mode = questions.ask("ECC mode", lambda: nvml.nvmlDeviceGetEccMode(handle))
    if mode is None or not mode[0]:
        return {"ecc_enabled": None if mode is None else False}

    def errors(kind: int) -> int:
        count: int = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)
        return count

    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {
        "ecc_enabled": True,
        "ecc_corrected_errors": questions.ask("corrected ECC errors", lambda: errors(corrected)),
        "ecc_uncorrected_errors": questions.ask("uncorrected ECC errors", lambda: errors(uncorrected)),
    }


def _clocks(questions: Questions, handle: Any) -> dict[str, Any]:
    nvml, ask = questions.nvml, questions.ask
    reasons = ask("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return {
        "sm_clock_mhz": ask("SM clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "sm_clock_max_mhz": ask("highest SM clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": ask("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "memory_clock_max_mhz": ask(
            "highest memory clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        ),
        "throttle_reasons": None if reasons is None else throttle_words(reasons),
    }


def _power(questions: Questions, handle: Any) -> dict[str, Any]:
    nvml = questions.nvml
    draw = questions.ask("power draw", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = questions.ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return {  # NVML answers in milliwatts
        "power_draw_watts": None if draw is None else draw / 1000,
        "power_limit_watts": None if limit is None else limit / 1000,
        "temperature_celsius": questions.ask(
            "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }


def _pcie(questions: Questions, handle: Any) -> dict[str, Any]:
    nvml, ask = questions.nvml, questions.ask
    return {
        "pcie_generation": ask("PCIe generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_generation_max": ask("highest PCIe generation", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_width": ask("PCIe width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": ask("highest PCIe width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _nvlink(questions: Questions, handle: Any) -> dict[str, Any]:
    """Active links, counted until NVML says that there are no more; what the first of them ends at."""
    nvml = questions.nvml
    active = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError as error:
            if error.value in (NOT_SUPPORTED, INVALID_ARGUMENT):
                break
            questions.note("NVLink", error.value)
            return {}
        if state:
            active.append(link)
    if not active:
        return {"nvlink_links": 0}
    remote = questions.ask("the far end of NVLink", lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, active[0]))
    is_switch = {nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: True, nvml.NVML_NVLINK_DEVICE_TYPE_GPU: False}
    return {"nvlink_links": len(active), "nvlink_to_switch": None if remote is None else is_switch.get(remote)}


def read_pair(questions: Questions, indexes: tuple[int, int], handles: tuple[Any, Any]) -> GpuPair:
    """Return how two GPUs reach each other."""
    nvml = questions.nvml
    ancestor = questions.ask("its place in the topology", lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(*handles))
    read = questions.ask("peer-to-peer copies", lambda: nvml.nvmlDeviceGetP2PStatus(*handles, _READ))
    nvlink = questions.ask("peers over NVLink", lambda: nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK))
    return GpuPair(
        first=indexes[0],
        second=indexes[1],
        ancestor=None if ancestor is None else ANCESTORS.get(ancestor),
        p2p=None if read is None else P2P_STATUS.get(read, "unknown"),
        nvlink=None if nvlink is None else nvlink == 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlAnswer:
    """NVML's report: GPUs in its own order, how pairs are joined, the driver, and its refusals as sentences."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    messages: tuple[str, ...] = ()


def probe_nvidia() -> NvmlAnswer:
    """Every NVIDIA GPU here; none, with a sentence about why, where a driver is installed that cannot be asked."""
    if not driver_library_loads():
        return NvmlAnswer(messages=(_NO_NVML,) if cuda_library_loads() else ())
    try:
        import pynvml  # 40 ms; only machines with a driver pay for it
    except ImportError:
        return NvmlAnswer(
            messages=("an NVIDIA driver is here but nvidia-ml-py is not; run `pip install nvidia-ml-py`",)
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        problem = INIT_ERRORS.get(error.value, f"the NVIDIA driver cannot be asked ({error})")
        return NvmlAnswer(messages=(problem,))
    try:
        return _read_machine(pynvml)
    finally:
        _quietly(pynvml, pynvml.nvmlShutdown)


_NO_NVML = (
    "a CUDA driver is here without its NVML (libnvidia-ml.so.1), which lists the GPUs; in a container set"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


def driver_library_loads() -> bool:
    """Return whether the driver's NVML library is on this machine."""
    return _loads("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")


def cuda_library_loads() -> bool:
    """Return whether the driver's CUDA library is on this machine, without which torch sees no NVIDIA GPU."""
    return _loads("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _read_machine(nvml: Any) -> NvmlAnswer:
    system = Questions(nvml, index=-1)
    driver = system.ask("the driver version", nvml.nvmlSystemGetDriverVersion)
    cuda = system.ask("the CUDA version", nvml.nvmlSystemGetCudaDriverVersion_v2)
    count = system.ask("the number of GPUs", nvml.nvmlDeviceGetCount) or 0
    questions = [Questions(nvml, index=index) for index in range(count)]
    handles = [of_gpu.ask("its handle", partial(nvml.nvmlDeviceGetHandleByIndex, of_gpu.index)) for of_gpu in questions]
    gpus = [read_gpu(of_gpu, handle) for of_gpu, handle in zip(questions, handles, strict=True)]
    pairs = [
        read_pair(questions[first], (first, second), (handles[first], handles[second]))
        for first, second in combinations(range(count), 2)
        if not (questions[first].lost or questions[second].lost)
    ]
    return NvmlAnswer(
        gpus=tuple(gpus),
        pairs=tuple(pairs),
        driver=driver,
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        messages=(*sentences([system]), *sentences(questions)),
    )


def _quietly(nvml: Any, call: Callable[[], object]) -> None:
    """Shutting down can fail on a GPU that was lost meanwhile; nothing is left to be done about it."""
    try:
        call()
    except nvml.NVMLError:
        return
