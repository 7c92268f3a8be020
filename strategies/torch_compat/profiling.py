"""torch's profiler, its history of a GPU's memory, and where it compiles extensions."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

__all__ = [
    "DeviceType",
    "build_directory",
    "dump_memory_history",
    "profiler_enabled",
    "record_memory_history",
]

profiler_enabled = _profiler_enabled


def record_memory_history(device: torch.device, most_events: int) -> None:
    """Begin to record what a GPU's allocator does, with the Python frames that asked for it."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(stacks="python", max_entries=most_events, device=device)


def dump_memory_history(path: Path) -> None:
    """Write what was recorded, and end the recording."""
    memory: Any = torch.cuda.memory
    memory._dump_snapshot(str(path))
    memory._record_memory_history(enabled=None)


def build_directory(extension: str) -> Path:
    """Return the directory in which torch compiles an extension."""
    return Path(import_module("torch.utils.cpp_extension")._get_build_directory(extension, False))
