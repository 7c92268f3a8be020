"""One GPU, and one pair of GPUs, as NVML describes them."""

from __future__ import annotations

from typing import Any

from hardware_db.probe import nvml_words as words
from hardware_db.probe.machine import Gpu, GpuPair, GpuProcess, MigDevice
from hardware_db.probe.nvml_questions import Questions

_READ, _NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t; pynvml's own constant for the first is a tuple by mistake


def read_gpu(asked: Questions, handle: Any) -> Gpu:
    """Everything NVML tells about one GPU; `handle` is None where even that was refused."""
    nvml, ask = asked.nvml, asked.ask
    if handle is None:
        return Gpu(index=asked.index, name="unknown NVIDIA GPU", lost=True)
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
        facts |= read(asked, handle)
    return Gpu(index=asked.index, **facts, lost=asked.lost)


def _memory(asked: Questions, handle: Any) -> dict[str, Any]:
    memory = asked.ask("memory", lambda: asked.nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = asked.ask("its processes", lambda: asked.nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    found: dict[str, Any] = {}
    if memory is not None:
        found = {"total_bytes": memory.total, "free_bytes": memory.free, "used_bytes": memory.used}
    if processes is not None:
        found["processes"] = tuple(GpuProcess(pid=item.pid, used_bytes=item.usedGpuMemory) for item in processes)
    return found


def _mig(asked: Questions, handle: Any) -> dict[str, Any]:
    nvml = asked.nvml
    mode = asked.ask("MIG mode", lambda: nvml.nvmlDeviceGetMigMode(handle), otherwise=[0, 0])
    if mode is None:
        return {}
    slices: list[MigDevice] = []
    if mode[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        count = asked.ask("its MIG devices", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        found = (_mig_device(asked, handle, index) for index in range(count))
        slices = [device for device in found if device is not None]
    return {"mig_enabled": mode[0] == nvml.NVML_DEVICE_MIG_ENABLE, "mig_devices": tuple(slices)}


def _mig_device(asked: Questions, handle: Any, index: int) -> MigDevice | None:
    """The slice in one place; None where the place is empty."""
    nvml = asked.nvml
    try:
        device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except nvml.NVMLError as error:
        if error.value not in (words.NOT_FOUND, words.INVALID_ARGUMENT):
            asked.note("a MIG device", error.value)
        return None
    memory = asked.ask("memory of a MIG device", lambda: nvml.nvmlDeviceGetMemoryInfo(device))
    attributes = asked.ask("size of a MIG device", lambda: nvml.nvmlDeviceGetAttributes(device))
    return MigDevice(
        name=asked.ask("name of a MIG device", lambda: nvml.nvmlDeviceGetName(device)) or f"MIG device {index}",
        uuid=asked.ask("UUID of a MIG device", lambda: nvml.nvmlDeviceGetUUID(device)),
        total_bytes=None if memory is None else memory.total,
        free_bytes=None if memory is None else memory.free,
        multiprocessors=None if attributes is None else attributes.multiprocessorCount,
    )


def _ecc(asked: Questions, handle: Any) -> dict[str, Any]:
    nvml = asked.nvml
    mode = asked.ask("ECC mode", lambda: nvml.nvmlDeviceGetEccMode(handle))
    if mode is None or not mode[0]:
        return {"ecc_enabled": None if mode is None else False}

    def errors(kind: int) -> int:
        count: int = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)
        return count

    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {
        "ecc_enabled": True,
        "ecc_corrected_errors": asked.ask("corrected ECC errors", lambda: errors(corrected)),
        "ecc_uncorrected_errors": asked.ask("uncorrected ECC errors", lambda: errors(uncorrected)),
    }


def _clocks(asked: Questions, handle: Any) -> dict[str, Any]:
    nvml, ask = asked.nvml, asked.ask
    reasons = ask("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return {
        "sm_clock_mhz": ask("SM clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "sm_clock_max_mhz": ask("highest SM clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": ask("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "memory_clock_max_mhz": ask(
            "highest memory clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        ),
        "throttle_reasons": None if reasons is None else words.throttle_words(reasons),
    }


def _power(asked: Questions, handle: Any) -> dict[str, Any]:
    nvml = asked.nvml
    draw = asked.ask("power draw", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = asked.ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return {  # NVML answers in milliwatts
        "power_draw_watts": None if draw is None else draw / 1000,
        "power_limit_watts": None if limit is None else limit / 1000,
        "temperature_celsius": asked.ask(
            "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }


def _pcie(asked: Questions, handle: Any) -> dict[str, Any]:
    nvml, ask = asked.nvml, asked.ask
    return {
        "pcie_generation": ask("PCIe generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_generation_max": ask("highest PCIe generation", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_width": ask("PCIe width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": ask("highest PCIe width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _nvlink(asked: Questions, handle: Any) -> dict[str, Any]:
    """Active links, counted until NVML says that there are no more; what the first of them ends at."""
    nvml = asked.nvml
    active = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError as error:
            if error.value in (words.NOT_SUPPORTED, words.INVALID_ARGUMENT):
                break
            asked.note("NVLink", error.value)
            return {}
        if state:
            active.append(link)
    if not active:
        return {"nvlink_links": 0}
    remote = asked.ask("the far end of NVLink", lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, active[0]))
    known = {nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: True, nvml.NVML_NVLINK_DEVICE_TYPE_GPU: False}
    return {"nvlink_links": len(active), "nvlink_to_switch": None if remote is None else known.get(remote)}


def read_pair(asked: Questions, indexes: tuple[int, int], handles: tuple[Any, Any]) -> GpuPair:
    """How two GPUs reach each other."""
    nvml = asked.nvml
    ancestor = asked.ask("its place in the topology", lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(*handles))
    read = asked.ask("peer-to-peer copies", lambda: nvml.nvmlDeviceGetP2PStatus(*handles, _READ))
    nvlink = asked.ask("peers over NVLink", lambda: nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK))
    return GpuPair(
        first=indexes[0],
        second=indexes[1],
        ancestor=None if ancestor is None else words.ANCESTORS.get(ancestor),
        p2p=None if read is None else words.P2P_STATUS.get(read, "unknown"),
        nvlink=None if nvlink is None else nvlink == 0,
    )
