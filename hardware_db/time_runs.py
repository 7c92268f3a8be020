"""TimeRun: how long one configuration of one model took on a real machine, as a row of `measurements/times_*.csv`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hardware_db.run_rows import RunRow, read_rows, write_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRun(RunRow):
    """A run with the seconds of one optimizer step, all ranks beginning it together.

    `cores` of `cpu` were there for all ranks, each of which computed on `threads`. `step_seconds` is the median over
    `steps` steps of the slowest rank, `fastest_seconds` and `slowest_seconds` their 10th and 90th percentile; forward,
    backward and optimizer are medians of their own. `rounds` is how often the run was started anew.
    """

    KIND: ClassVar[str] = "timed run"
    MEASURED: ClassVar[tuple[str, ...]] = (
        *("rounds", "steps", "step_seconds", "fastest_seconds", "slowest_seconds"),
        *("forward_seconds", "backward_seconds", "optimizer_seconds"),
    )

    cpu: str
    cores: int
    threads: int
    rounds: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    fastest_seconds: float = 0.0
    slowest_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def spread(self) -> float:
        """How far apart the steps of the run lay, over their median."""
        return (self.slowest_seconds - self.fastest_seconds) / self.step_seconds


def read_time_runs(path: Path) -> list[TimeRun]:
    """The runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    return read_rows(TimeRun, path)


def write_time_runs(path: Path, runs: Iterable[TimeRun]) -> None:
    """Replace the file by these runs in one step."""
    write_rows(TimeRun, path, runs)
