"""Stopping on purpose: all ranks agree on a step, save, and end with status 75.

A collective at every step would cost every step. Instead the watchdog threads leave notes on the ranks' board. Who is
asked to stop pins up the wish; every rank's thread that sees it *arms* its rank and says so; an armed rank reads the
board at each step's end. When all are armed, rank 0 names the next step. No rank can have ended that one, because
ending it takes rank 0's part of its collectives, which come later; and every rank looks before it goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from strategies.launch.endings import STOPPED, EndingKind
from strategies.supervised.signals import STOP_SIGNAL, Request

if TYPE_CHECKING:
    from strategies.supervised.board import Board

_WISH, _STEP = "stop", "stop-at"
_FAREWELL_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class Stopped(SystemExit):
    """Raised out of `engine.step()` where a rank saved and stops on purpose."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class Stopping:
    """One rank's part of the agreement. `poll` is the watchdog thread's, `is_at` the main thread's."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        self._board, self._rank, self._world_size = board, rank, world_size
        self._armed: Request | None = None
        self._ready = False

    @property
    def request(self) -> Request | None:
        """What is asked for, once this rank knows."""
        return self._armed or STOP_SIGNAL.request

    def poll(self) -> None:
        """Spread this rank's wish to stop, and see that of others."""
        if self._armed is not None:
            return
        own, text = STOP_SIGNAL.request, self._board.get(_WISH)
        if text is None and own is not None:
            text = json.dumps({"kind": own.kind, "seconds": max(0.0, own.deadline - time.monotonic())})
            self._board.put(_WISH, text)
        if text is None:
            return
        wish = json.loads(text)
        STOP_SIGNAL.ask(wish["kind"], wish["seconds"])
        deadline = time.monotonic() + wish["seconds"] if own is None else own.deadline
        self._board.put(_armed(self._rank), "")
        self._armed = Request(kind=wish["kind"], deadline=deadline)

    def is_at(self, step: int) -> bool:
        """Whether this step, which has just ended, is the one after which all ranks stop."""
        if self._world_size == 1:
            return self.request is not None
        if self._armed is None:
            return False
        text = self._board.get(_STEP)
        if text is None and self._rank == 0 and self._all_armed():
            text = str(step + 1)
            self._board.put(_STEP, text)
        return text is not None and step >= int(text)

    def take_leave(self) -> None:
        """Wait a moment until all ranks are ready to end, because launchers kill the others when one has ended."""
        self._board.put(_gone(self._rank), "")
        until = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < until and not self._all(_gone):
            time.sleep(_LOOK_SECONDS)

    def _all_armed(self) -> bool:
        self._ready = self._ready or self._all(_armed)
        return self._ready

    def _all(self, key: Callable[[int], str]) -> bool:
        return all(self._board.get(key(rank)) is not None for rank in range(self._world_size))


def request_stop(kind: EndingKind) -> None:
    """Let the run save and stop at the next step on which all ranks agree; any one rank may ask."""
    STOP_SIGNAL.ask(kind, sys.float_info.max if kind == "switch" else None)


def _armed(rank: int) -> str:
    return f"armed-{rank}"


def _gone(rank: int) -> str:
    return f"gone-{rank}"
