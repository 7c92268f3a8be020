"""Which GPUs the environment shows to a training process (CUDA C++ programming guide, "CUDA environment variables")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hardware_db.probe.machine import Gpu

_VARIABLES = {"nvidia": ("CUDA_VISIBLE_DEVICES",), "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def with_visibility(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The same GPUs, those hidden by CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) marked as not visible.

    As the CUDA runtime does, reading stops at the first entry that names no GPU.
    """
    return tuple(replace(gpu, visible=gpu.index in _shown(gpu.vendor, gpus, environment)) for gpu in gpus)


def _shown(vendor: str, gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> set[int]:
    mine = [gpu for gpu in gpus if gpu.vendor == vendor]
    setting = next((environment[name] for name in _VARIABLES.get(vendor, ()) if name in environment), None)
    if setting is None:
        return {gpu.index for gpu in mine}
    shown: set[int] = set()
    for entry in setting.split(","):
        found = _named(entry.strip(), mine)
        if found is None:
            break
        shown.add(found)
    return shown


def _named(entry: str, gpus: list[Gpu]) -> int | None:
    """The index of the GPU that an entry names: by index, by the beginning of its UUID or of a slice's UUID."""
    if entry.isdigit():
        return next((gpu.index for gpu in gpus if gpu.index == int(entry)), None)
    for gpu in gpus:
        uuids = [gpu.uuid, *(device.uuid for device in gpu.mig_devices)]
        if entry and any(uuid is not None and uuid.startswith(entry) for uuid in uuids):
            return gpu.index
    return None
