"""Versions of what is installed, read from package metadata and torch's version file; nothing is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import replace

from hardware_db.probe.machine import Gpu, Software

# The names under which each is distributed; the first that is installed counts.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "dsplan": ("dsplan",),
}


def probe_software() -> Software:
    """Python, torch and the CUDA (or ROCm) it was built for, NCCL, deepspeed, transformers, accelerate, dsplan."""
    installed = {package: _version(names) for package, names in _DISTRIBUTIONS.items()}
    return Software(
        python=platform.python_version(),
        torch_cuda=_torch_build() if installed["torch"] else None,
        packages=tuple((package, version) for package, version in installed.items() if version),
    )


def _version(names: tuple[str, ...]) -> str | None:
    from importlib import metadata  # 12 ms, which most questions do without

    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _torch_build() -> str | None:
    """Return `12.4`, `rocm 6.2` or `cpu` from the assignments in torch/version.py, or None without that file."""
    from importlib import metadata

    path = metadata.distribution("torch").locate_file("torch/version.py")
    try:
        with open(str(path), encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return None
    for name, prefix in (("cuda", ""), ("hip", "rocm ")):
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            return prefix + match[1]
    return "cpu"


# Which GPUs the environment shows to a training process (CUDA C++ programming guide, "CUDA environment variables").


_VARIABLES = {"nvidia": ("CUDA_VISIBLE_DEVICES",), "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def mark_visibility(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the same GPUs, those hidden by CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) marked as not visible.

    As the CUDA runtime does, reading stops at the first entry that names no GPU. A GPU of which slices are named has
    these alone.
    """
    shown = {vendor: _shown(vendor, gpus, environment) for vendor in {gpu.vendor for gpu in gpus}}
    return tuple(_marked(gpu, shown[gpu.vendor]) for gpu in gpus)


def _marked(gpu: Gpu, shown: Mapping[int, list[str]] | None) -> Gpu:
    if shown is None or gpu.index not in shown:
        return replace(gpu, visible=shown is None)
    named = tuple(part for part in gpu.mig_devices if any((part.uuid or "").startswith(e) for e in shown[gpu.index]))
    return replace(gpu, visible=True, mig_devices=named or gpu.mig_devices)


def _shown(vendor: str, gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> dict[int, list[str]] | None:
    """Return the entries that name each GPU, by its index; None where all are shown."""
    mine = [gpu for gpu in gpus if gpu.vendor == vendor]
    setting = next((environment[name] for name in _VARIABLES.get(vendor, ()) if name in environment), None)
    if setting is None:
        return None
    shown: dict[int, list[str]] = {}
    for entry in map(str.strip, setting.split(",")):
        index = _index_of(entry, mine)
        if index is None:
            break
        shown.setdefault(index, []).append(entry)
    return shown


def _index_of(entry: str, gpus: list[Gpu]) -> int | None:
    """Return the index of the GPU that an entry names: by index, by the beginning of its UUID or of a slice's UUID."""
    if entry.isdigit():
        return next((gpu.index for gpu in gpus if gpu.index == int(entry)), None)
    for gpu in gpus:
        uuids = [gpu.uuid, *(device.uuid for device in gpu.mig_devices)]
        if entry and any(uuid is not None and uuid.startswith(entry) for uuid in uuids):
            return gpu.index
    return None
