"""The options of an attempt, which `dsplan run` hands to its ranks as one file of the run directory. No torch.

A run is a chain of attempts, each in fresh processes. Before an attempt the command writes its options; a rank reads
them when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strategies.run_directory.files import ATTEMPT_OPTIONS_FILE, SPEC_FILE, read_json, write_json
from strategies.run_directory.spec import LaunchSpec, SupervisionOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedPlan:
    """A plan that ran out of memory in this run: the `plan` section of the JSON contract, and the peak it predicted.

    Every plan that predicts as much or more is out of the question too.
    """

    configuration: Mapping[str, Any]
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOptions:
    """The options of one attempt."""

    attempt: int = 0
    """Counted from 0."""
    resumes: bool = False
    """Whether the newest checkpoint of the run is loaded before the first step."""
    supervision: SupervisionOptions
    """That of the launch; its checkpoint directory is a path, and counts unless the script saves by itself."""
    global_batch_size: int | None = None
    """What the first attempt trained with, which every later plan keeps; None before it."""
    failed_plans: tuple[FailedPlan, ...] = ()
    run_id: str = ""
    """Marks the run's checkpoints; where it `has_nodes`, those that another node's rank 0 wrote bear that one's id."""
    has_nodes: bool = False
    """Whether nodes come and go."""
    most_ranks: int = 0
    """Ranks when all nodes have come; 0: not known."""
    reached: int = 0
    """The highest step that earlier attempts are known to have come to; 0: none."""
    may_begin_anew: bool = True
    """Whether no checkpoint of the run was ever complete, so that nothing is lost."""
    since: int = 0
    """The first attempt whose checkpoints count."""
    base: str = ""
    """The checkpoint that counts before there is one since then (`--resume-from`); empty: none."""

    def counts(self, run: str, attempt: int) -> bool:
        """Return whether a checkpoint of that run id and attempt is one to resume from."""
        return attempt >= self.since and (self.has_nodes or run in ("", self.run_id))

    def save(self, run_directory: Path) -> None:
        """Replace the options in a run directory."""
        write_json(run_directory / ATTEMPT_OPTIONS_FILE, asdict(self))

    @classmethod
    def load(cls, run_directory: Path) -> AttemptOptions | None:
        """Read the options in a run directory; None if it has none, as for ranks that nobody supervises."""
        path = run_directory / ATTEMPT_OPTIONS_FILE
        return read_json(cls, path, lambda document: _nest(document, run_directory)) if path.exists() else None


def _nest(document: Any, run_directory: Path) -> Any:
    """Return options with the launch's supervision, of which earlier releases had some fields beside the others."""
    if not isinstance(document, dict) or "supervision" in document:
        return document
    others = {name: value for name, value in document.items() if name not in SupervisionOptions.__slots__}
    return {**others, "supervision": asdict(LaunchSpec.load(run_directory / SPEC_FILE).supervision)}
