"""What a benchmark hands to its ranks. Torch is imported by the rank that calls it, not by who draws the progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Rate, Refusal
from planner.vocabulary import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """A training run: `plan` is the object of the JSON contract, `config` empty for a model that is known by name.

    Metrics go to `run_directory`; steps are timed for about `seconds`, with `threads` threads per rank.
    """

    model: str
    config: Mapping[str, Any]
    task: Task
    plan: Mapping[str, Any]
    run_directory: str
    seconds: float
    threads: int


def measure_point(point: Point, threads: int) -> Rate | Refusal:
    """The rate of a point, on every rank of the group; see `hardware_db.microbench.runner`."""
    from hardware_db.microbench.runner import measure_on_rank

    return measure_on_rank(point, threads)


def train_trainee(trainee: Trainee) -> None:
    """A training run, on every rank of the group; see `strategies.bench.training`."""
    from strategies.bench.training import train

    train(trainee)
