"""Course: which steps a run has reached, when, and what restarts cost it. No torch."""

from __future__ import annotations

from array import array

_NEVER = -1.0


class Course:
    """The steps of a run as they are seen, counted from 1 over all attempts; times are of a clock that only runs on.

    `highest` is the highest step ever reached, `first` and `last` those of the present attempt, None before it has any.
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest
        self.first: int | None = None
        self.last: int | None = None
        self._before = highest
        self._saved = self._saved_before = 0
        self._reached = array("d")
        self._began: list[float] = []

    @property
    def progressed(self) -> bool:
        """Whether the present attempt got further than all before it, or saved what a crash had undone."""
        return self.highest > self._before or self._saved > self._saved_before

    def begin(self, now: float) -> None:
        """An attempt begins."""
        self.first = self.last = None
        self._before, self._saved_before = self.highest, self._saved
        self._began.append(now)

    def reached(self, step: int, now: float) -> float | None:
        """A step is done. For the first step of a later attempt: by how many seconds the restart put the run back, None
        where that cannot be known, as for a run that was gone on with by another command."""
        lost = self._put_back(step, now) if self.first is None and len(self._began) > 1 else None
        self.first = step if self.first is None else self.first
        self.last = step
        self.highest = max(self.highest, step)
        self._reached.extend([_NEVER] * (step + 1 - len(self._reached)))
        self._reached[step] = now
        return lost

    def saved(self, step: int) -> None:
        """The newest checkpoint is one of `step`."""
        self._saved = max(self._saved, step)

    def _put_back(self, step: int, now: float) -> float | None:
        """Since the step was done before; else since the one before it; else since the run began."""
        for known in (step, step - 1):
            if known < len(self._reached) and self._reached[known] != _NEVER:
                return now - self._reached[known]
        return self._began[-1] - self._began[0] if step == 1 else None
