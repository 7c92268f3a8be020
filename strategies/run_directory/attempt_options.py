"""The options of an attempt, which `dsplan run` hands to its ranks as one file of the run directory. No torch.

A run is a chain of attempts, each in fresh processes. Before an attempt the command writes its options; a rank reads
them when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from strategies.run_directory.spec import read_json, write_json

ORDERS_FILE = "orders.json"
CHECKPOINTS = "checkpoints"
"""Where in the run directory the ranks save by themselves unless `--checkpoint-dir` says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedPlan:
    """A plan that ran out of memory in this run: the `plan` section of the JSON contract, and the peak it predicted.

    Every plan that predicts as much or more is out of the question too.
    """

    configuration: Mapping[str, Any]
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOptions:
    """The options of one attempt.

    `attempt` counts from 0; `resumes` says that the newest checkpoint of the run is loaded before the first step.
    Checkpoints go to `checkpoint_directory` every `checkpoint_minutes` and every `checkpoint_steps` (None: that one
    does not count), unless the script saves by itself. `hang_seconds` without progress end the attempt.
    `global_batch_size` is what the first attempt trained with (None before it): every later plan keeps it.

    `run_id` marks the run's checkpoints; where a run `has_nodes` that come and go, those that another node's rank 0
    wrote bear the id of that one, and there are `most_ranks` when all have come (0: that is not known).

    `reached` is the highest step that earlier attempts are known to have come to (0: none), and `may_begin_anew` says
    that no checkpoint of the run was ever complete, so that nothing is lost. Only checkpoints of attempts from `since`
    on count; before there is one, `base` does, a checkpoint that was named (`--resume-from`; empty: none).
    """

    attempt: int = 0
    resumes: bool = False
    checkpoint_directory: str
    checkpoint_minutes: float | None = 10.0
    checkpoint_steps: int | None = None
    hang_seconds: float = 900.0
    tunes: bool = False
    global_batch_size: int | None = None
    failed_plans: tuple[FailedPlan, ...] = field(default_factory=tuple)
    run_id: str = ""
    has_nodes: bool = False
    most_ranks: int = 0
    reached: int = 0
    may_begin_anew: bool = True
    since: int = 0
    base: str = ""

    def counts(self, run: str, attempt: int) -> bool:
        """Whether a checkpoint that a run directory knows of, with the id of its run, is one to resume from."""
        return attempt >= self.since and (self.has_nodes or run in ("", self.run_id))

    def save(self, run_directory: Path) -> None:
        """Replace the options in a run directory."""
        write_json(run_directory / ORDERS_FILE, asdict(self))

    @classmethod
    def load(cls, run_directory: Path) -> AttemptOptions | None:
        """The options in a run directory, None if it has none, as for ranks that nobody supervises."""
        path = run_directory / ORDERS_FILE
        return read_json(cls, path) if path.exists() else None
