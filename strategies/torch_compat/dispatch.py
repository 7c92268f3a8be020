"""Fake tensors, modes that see every operation, and what torch's dispatcher knows of operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
]

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def without_modes() -> AbstractContextManager[object]:
    """No mode sees the operations inside."""
    run: Any = _disable_current_modes
    context: AbstractContextManager[object] = run()
    return context


def without_python() -> AbstractContextManager[object]:
    """No mode and no tensor subclass sees the operations inside."""
    context: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return context


def without_cpu_autocast() -> AbstractContextManager[object]:
    """Autocast's rules for CPU tensors do not hold inside."""
    context: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)
    return context


def operations() -> set[str]:
    """Return the names of all operations that are registered, as `aten::add.Tensor`."""
    return set(torch._C._dispatch_get_all_op_names())


def has_kernel(name: str, key: str) -> bool:
    """Return whether an operation has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: its name, arguments and returns."""
    return operation._schema


def packet_of(operation: Any) -> Any:
    """Return what all overloads of an operation belong to."""
    return operation._overloadpacket


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Nothing is logged inside of operations that have no fake form."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
