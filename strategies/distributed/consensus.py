"""Decisions that one rank takes for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from hardware_db.errors import DsplanError

Value = TypeVar("Value")


def on_rank_zero(decide: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Return what `decide` returns on rank 0, on every rank; without a process group, just its value.

    Every rank must call it together; with a `group`, its ranks, the first of which decides.

    Raises:
        DsplanError: the expected failure that `decide` met on rank 0, on every rank, so that none waits for the others.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return decide()
    box: list[object] = [None]
    refusal: DsplanError | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = decide()
        except DsplanError as error:
            refusal, box[0] = error, _Refusal(error=error)
    dist.broadcast_object_list(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if isinstance(box[0], _Refusal):
        raise refusal or box[0].error
    return cast("Value", box[0])


def everywhere(attempt: Callable[[], Value]) -> Value:
    """Return what `attempt` returns on this rank, once it has gone well on every rank.

    Every rank must call it together; without a process group, it is just called.

    Raises:
        DsplanError: the expected failure of the first rank that met one, on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return attempt()
    value: Value | None = None
    failure: BaseException | None = None
    refusal: _Refusal | None = None
    try:
        value = attempt()
    except BaseException as error:
        # A bug keeps its traceback on the rank that has it; the others must not wait for that rank.
        failure = error
        refusal = _Refusal(error=error if isinstance(error, DsplanError) else _failure_of_bug(error))
    box = objects_of_all(refusal)
    failed = [rank for rank, refused in enumerate(box) if refused is not None]
    if failure is not None and (failed[0] == dist.get_rank() or not isinstance(failure, DsplanError)):
        raise failure
    if first := next(filter(None, box), None):
        raise first.error
    return cast("Value", value)


def objects_of_all(own: Value) -> list[Value]:
    """Return every rank's object, by rank; without a process group, its own alone. Every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """An expected failure where a value could be."""

    error: DsplanError


def _failure_of_bug(error: BaseException) -> DsplanError:
    """Return what the other ranks raise, with the exit status of a failure."""
    failure = DsplanError(f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
    failure.exit_code = 1
    return failure
