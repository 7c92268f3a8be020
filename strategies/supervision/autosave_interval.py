"""Clock by which ranks save by themselves: a pure function of steps and times. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hardware_db.units import format_seconds
from planner.cost.failures import best_interval
from strategies.run_directory.spec import SupervisionOptions

CHECKPOINT_MINUTES = 10.0
"""The interval of a run that names none: what a crash costs at the most, without a save at every few steps."""
_FURTHEST_LOOK = 50
"""Steps between looks at most: the next steps may take far longer than the last."""
_CLOSE = 0.02
"""Share of the interval by which a save may come early."""
_RETRY_SECONDS = 60.0
_WORTH_SAYING = 0.25
"""Share by which the best interval has to differ from the one that was last said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Interval of saves: so many seconds, and every multiple of so many steps; None: not by that.

    With `mttf`, the mean seconds between failures of the job, the seconds are those with the largest goodput as soon as
    a save has shown how long it keeps training waiting.
    """

    seconds: float | None = None
    steps: int | None = None
    mttf: float | None = None

    @classmethod
    def of(cls, options: SupervisionOptions) -> Interval:
        """Return the interval that a run's options ask for."""
        minutes, hours = options.checkpoint_minutes, options.mttf_hours
        return cls(
            seconds=None if minutes is None else 60 * minutes,
            steps=options.checkpoint_steps,
            mttf=None if hours is None else 3600 * hours,
        )

    @property
    def is_set(self) -> bool:
        """True if ranks save by themselves at all."""
        return self.seconds is not None or self.steps is not None


class SaveClock:
    """Decides at which steps to look, and there whether to save.

    Every rank has one and feeds it the same values, so all decide alike. Time counts from the first look on, and again
    from the look after a save.
    """

    def __init__(self, interval: Interval, *, step: int) -> None:
        self._interval = interval
        self._counts_from: float | None = None
        self._looked_at, self._looked_step = 0.0, step
        self._has_failed = False
        self._said_seconds = 0.0
        self.next_look = step + 1

    def is_due(self, step: int, now: float, save_seconds: float | None = None) -> bool:
        """Return whether to save at this step, a look; set the next one.

        `now` is rank 0's time in seconds, `save_seconds` what its last save kept training waiting; None: unknown.
        """
        mttf = self._interval.mttf
        if save_seconds is not None and mttf is not None:
            self._interval = replace(self._interval, seconds=best_interval(save_seconds, mttf))
        every = self._interval.steps
        if self._counts_from is None:
            self._counts_from = now
            self._looked_at, self._looked_step = now, step - 1
        left = self._left(now)
        self._set_next(step, now, left)
        is_time = left is not None and left <= _CLOSE * (self._interval.seconds or 0.0)
        return is_time or (every is not None and step % every == 0)

    def change(self, save_seconds: float | None) -> str | None:
        """Return the interval that follows from the length of a save, where it is not about the one last said."""
        seconds, mttf = self._interval.seconds, self._interval.mttf
        if save_seconds is None or mttf is None or seconds is None:
            return None
        if abs(seconds - self._said_seconds) <= _WORTH_SAYING * self._said_seconds:
            return None
        self._said_seconds = seconds
        often = f"checkpoints every {format_seconds(seconds)} lose least time"
        return f"{often}: one takes {format_seconds(save_seconds)}, and a failure comes every {format_seconds(mttf)}"

    def saved(self) -> None:
        """Begin to count anew: a checkpoint was begun, by whomever."""
        self._counts_from, self._has_failed = None, False

    def failed(self) -> None:
        """Let the next try by time come within a minute: a checkpoint could not be written."""
        self._counts_from, self._has_failed = None, True

    def _left(self, now: float) -> float | None:
        """Return the seconds until it is time to save, or None if time does not count."""
        seconds, since = self._interval.seconds, self._counts_from
        if seconds is None or since is None:
            return None
        return (min(seconds, _RETRY_SECONDS) if self._has_failed else seconds) - (now - since)

    def _set_next(self, step: int, now: float, left: float | None) -> None:
        per_step = (now - self._looked_at) / max(1, step - self._looked_step)
        self._looked_at, self._looked_step = now, step
        ahead = _FURTHEST_LOOK
        if left is not None:
            ahead = min(ahead, int(max(left, 0.0) / per_step / 2)) if per_step > 0 else 1
        self.next_look = step + max(1, ahead)
        if self._interval.steps is not None:
            multiple = (step // self._interval.steps + 1) * self._interval.steps
            self.next_look = min(self.next_look, multiple)
