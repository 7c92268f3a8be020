"""Versions of what is installed, read from package metadata and torch's version file; nothing is imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from hardware_db.probe.machine import Software

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
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _torch_build() -> str | None:
    """`12.4`, `rocm 6.2` or `cpu`, from the assignments in torch/version.py; None where that file is not there."""
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
