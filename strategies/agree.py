"""Decisions that one rank takes for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from hardware_db.errors import DsplanError

Value = TypeVar("Value")


def on_rank_zero(decide: Callable[[], Value]) -> Value:
    """What `decide` returns on rank 0, on every rank; without a process group, just its value.

    Every rank must call this together.

    Raises:
        DsplanError: the expected failure that `decide` met on rank 0, on every rank, so that none waits for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    box: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = decide()
        except DsplanError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], DsplanError):
        raise box[0]
    return cast("Value", box[0])
