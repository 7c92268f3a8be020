"""Decisions after an ending: another attempt, at once or after a pause, another plan, or the end. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from strategies.launch.failure_causes import Ending

Action = Literal["restart", "next_plan", "switch", "stop", "give_up"]

RETRIES = 3
"""Attempts in a row without progress before a run is given up, where something can be resumed."""
_LONGEST_PAUSE_SECONDS = 60.0
_REPEATABLE = ("killed", "lost", "hung", "disk_full")
"""Endings that come from outside the program, so that their coming again at the same step says nothing."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The step that follows an ending, after which pause, and why, in words that follow the ending's."""

    action: Action
    why: str
    delay_seconds: float = 0.0

    @property
    def continues(self) -> bool:
        """True if another attempt follows."""
        return self.action in ("restart", "next_plan", "switch")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The run when an attempt ended."""

    highest_step: int = 0
    """That the run ever reached; 0: none."""
    progressed: bool = False
    """Whether the attempt got further than every one before."""
    has_plan: bool = False
    """Whether a plan is known, which other plans may replace."""
    can_resume: bool = True
    """Whether another attempt could resume anything."""
    stays: bool = False
    """Whether this node resumes where another one was stopped."""
    memory_bytes: int | None = None
    """Of the largest device or of the host, whichever is more."""


class Policy:
    """Decides ending by ending, after at most `retries` endings in a row without progress.

    Pauses are 0, 1, 2, 4 ... 60 seconds. With None, a script that has nothing to resume from is not begun again.
    """

    def __init__(self, retries: int | None) -> None:
        self._requested = retries
        self._retries = RETRIES if retries is None else retries
        self._used = 0
        self._last: Ending | None = None

    def decide(self, ending: Ending, now: RunContext) -> Decision:
        """Return what follows `ending`."""
        last, self._last = self._last, ending
        if self._requested is None:
            self._retries = RETRIES if now.can_resume else 0
        if now.progressed:
            self._used = 0
        if ending.kind == "regrouped" or (ending.kind == "preempted" and now.stays):
            return Decision(action="restart", why="all nodes there are start again together")
        if ending.kind == "preempted":
            return Decision(action="stop", why="the run ends here")
        if ending.kind == "switch":
            return Decision(action="switch", why="continues under the plan that measured steps predict to be faster")
        if ending.kind == "refused":
            return Decision(action="give_up", why="no repetition mends this")
        if ending.kind == "out_of_memory" and now.has_plan:
            return self._without_memory(ending, now)
        return self._hopeless(ending, last, now) or self._again()

    def _without_memory(self, ending: Ending, now: RunContext) -> Decision:
        size = _requested_bytes(ending.reason)
        if size is not None and now.memory_bytes is not None and size > now.memory_bytes:
            return Decision(action="give_up", why="one tensor is larger than all memory here, which no plan mends")
        return Decision(action="next_plan", why="the next plan that needs less memory follows")

    def _hopeless(self, ending: Ending, last: Ending | None, now: RunContext) -> Decision | None:
        """Return the end of the run where the program itself is at fault and would be again."""
        if self._retries == 0 or ending.kind in _REPEATABLE:
            return None
        if now.highest_step == 0:
            return Decision(action="give_up", why="it came before the first step, so it would come again")
        if last is not None and _identity(ending) == _identity(last):
            return Decision(action="give_up", why="the same came at the same step before, so it would come again")
        return None

    def _again(self) -> Decision:
        self._used += 1
        if self._used > self._retries:
            why = f"{self._retries} restarts brought no progress" if self._retries else "nothing was to be retried"
            return Decision(action="give_up", why=why)
        pause = 0.0 if self._used == 1 else min(2.0 ** (self._used - 2), _LONGEST_PAUSE_SECONDS)
        why = f"restart {self._used} of {self._retries} without progress" if self._used > 1 else "starts again"
        return Decision(action="restart", why=why, delay_seconds=pause)


def _identity(ending: Ending) -> tuple[object, ...]:
    return ending.kind, ending.type, ending.reason, ending.step


def _requested_bytes(reason: str) -> int | None:
    """Return the bytes that an allocator says were requested, or None if it does not say."""
    match = _REQUESTED.search(reason)
    return None if match is None else int(float(match[1].rstrip(".")) * _UNITS[(match[2] or "bytes").lower()])
