"""Refusals of the tracer, in one line that names the operation and the part of the module."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.errors import DsplanError
from strategies.torch_compat.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    schema_of,
)
from strategies.tracing.step.storages import Storages


class TraceFailed(DsplanError):
    """A step that could not be run on fake tensors; the message is one line.

    `operation` is torch's name of what failed (empty where it was Python code), `module_path` the innermost module that
    was running, `reason` the first line of what was raised.
    """

    def __init__(self, operation: str, module_path: str, reason: str) -> None:
        self.operation, self.module_path, self.reason = operation, module_path, reason
        what = operation or "the code"
        where = f" in {module_path}" if module_path else ""
        super().__init__(f"the trace cannot follow {what}{where}: {reason}")


# The one line that says where a trace stopped.


class Following:
    """Turns what a step raises inside into a `TraceFailed` with the operation and the innermost module."""

    def __init__(self, module: nn.Module, storages: Storages) -> None:
        self._storages = storages
        self._running: list[str] = []
        self._hooks = [
            handle
            for name, part in module.named_modules()
            for handle in (
                part.register_forward_pre_hook(self._entering(name or _class_name(module))),
                part.register_forward_hook(self._left),
            )
        ]

    def __enter__(self) -> Following:
        return self

    def __exit__(self, kind: Any, problem: BaseException | None, _traceback: Any) -> None:
        for handle in self._hooks:
            handle.remove()
        if isinstance(problem, Exception) and not isinstance(problem, TraceFailed):
            lines = str(problem).strip().splitlines() or [type(problem).__name__]
            where = self._running[-1] if self._running else ""
            raise TraceFailed(self._storages.operation, where, lines[0][:200]) from problem

    def _entering(self, name: str) -> Any:
        def enter(*_arguments: object) -> None:
            self._running.append(name)

        return enter

    def _left(self, *_arguments: object) -> None:
        if self._running:
            self._running.pop()


def _class_name(module: nn.Module) -> str:
    """Return the name that the module's author gave its class; `fully_shard` makes one of its own from it."""
    kind = type(module)
    return (kind.__bases__[-1] if issubclass(kind, FSDPModule) else kind).__name__


_SHAPE = "has a data-dependent shape"
_VALUE = "reads a value, and fake tensors have none"
_MEMORY = "reads memory, and fake tensors have none"
_KERNEL = "has no form for fake tensors; register one with torch.library.register_fake"
_SAID_OF_MEMORY = ("data pointer of Tensor", "data is not allocated yet", ".numpy() is not supported")
"""What torch says where compiled code, or numpy, wants the memory of a fake tensor."""
_KNOWN_AS = {"aten::_local_scalar_dense": "aten::_local_scalar_dense (Tensor.item, or a tensor as a condition)"}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])


class MemoryRead(Exception):
    """Code outside torch asks a fake tensor for its memory. Torch answers 0, at which a kernel would crash."""


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Keep what runs inside off the memory that fake tensors lack, and off stderr what is reported in one line."""
    kind: Any = FakeTensor
    inherited = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        if not sys._getframe(1).f_code.co_filename.startswith((_TORCH, _HERE)):
            raise MemoryRead
        return int(inherited(tensor))

    kind.data_ptr = data_ptr
    try:
        with _quiet():
            yield
    finally:
        del kind.data_ptr


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # meant for real runs
            yield
    finally:
        logging.disable(before)


def why_refused(problem: TraceFailed, module: nn.Module) -> str:
    """Return what cannot be followed, and where; for other failures what the module raised."""
    where = _dotted_name(problem.module_path, type(module).__name__)
    for raised in _causes(problem):
        refusal = _cannot(raised)
        if refusal:
            operation, why = refusal
            return f"{operation} in {where} {why}"
    if not problem.module_path and not problem.operation:
        return problem.reason
    return f"{where} raised {type(problem.__cause__).__name__}: {problem.reason}"


def _cannot(raised: BaseException) -> tuple[str, str] | None:
    """Return the operation that fake tensors do not have, and what it lacks; None for a failure of another kind."""
    if isinstance(raised, DynamicOutputShapeException):
        return _name(raised.func), _SHAPE
    if isinstance(raised, DataDependentOutputException):
        return _name(raised.func), _VALUE
    if isinstance(raised, UnsupportedOperatorException):
        return _name(raised.func), _KERNEL
    if isinstance(raised, MemoryRead):
        return f"data_ptr at {_own_line(raised)}", _MEMORY
    if any(words in str(raised) for words in _SAID_OF_MEMORY):
        return _own_line(raised), _MEMORY
    return None


def _dotted_name(path: str, root: str) -> str:
    """`MyModel.blocks.3.router`; where no part of the module was running, its backward was."""
    if not path:
        return f"the backward pass of {root}"
    return path if path == root else f"{root}.{path}"


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """Return the exceptions that a failure was raised from."""
    current = problem.__cause__
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _name(func: Any) -> str:
    """Spell an operation as torch's schemas do: `aten::nonzero`."""
    name = str(schema_of(func).name)
    return _KNOWN_AS.get(name, name)


def _own_line(problem: BaseException) -> str:
    """Return the innermost line of the module's code that led to an exception: `attention.py line 12 (forward)`."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _HERE))]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno} ({own[-1].name})" if own else "compiled code"
