"""Says in one line where a trace stopped."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.trace.failed import TraceFailed
from planner.trace.storages import Storages


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
    """The name that the module's author gave its class; `fully_shard` makes one of its own from it."""
    made = type(module)
    return (made.__bases__[-1] if issubclass(made, FSDPModule) else made).__name__
