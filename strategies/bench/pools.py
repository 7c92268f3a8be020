"""The ranks that a benchmark runs on: one pool at a time, kept as long as the next piece of work can use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hardware_db.spawn import RankError, RankPool

_CALL_SECONDS = 300.0


class Pools:
    """Pools of ranks by number and kind. DeepSpeed leaves state behind in a process, so it gets its own. Use as a
    context manager: leaving it ends the ranks."""

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._kind: tuple[int, bool] | None = None
        self._pool: RankPool | None = None

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, deepspeed: bool = False) -> list[Any]:
        """What every rank returned.

        Raises:
            RankError: a rank raised, died or did not answer; the next call starts new ones.
        """
        if self._pool is None or self._kind != (ranks, deepspeed):
            self.close()
            # Without a GPU DeepSpeed must be told that there is none.
            variables = {} if self._gpu else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
            variables["DSPLAN_QUIET"] = "1"
            backend = "nccl" if self._gpu else "gloo"
            self._kind = (ranks, deepspeed)
            self._pool = RankPool(ranks, backend=backend, timeout_seconds=_CALL_SECONDS, variables=variables)
        try:
            return self._pool.run(function, *arguments)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def threads_of(ranks: int) -> int:
    """Threads that each of so many ranks computes in: what `dsplan run` gives them."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else max(1, (os.cpu_count() or 1) // ranks)
