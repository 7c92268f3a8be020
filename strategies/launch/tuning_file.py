"""What tuning has measured so far: `tuning.json` in the run directory of rank 0's node. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strategies.launch.spec import write_json

TUNING_FILE = "tuning.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A plan (the object of the JSON contract) and the seconds that its step took, without the first ones."""

    plan: Mapping[str, Any]
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The plans that were measured, in this order; the one to go on with; and whether nothing is to be tried any more.

    `switches` counts the changes of plan that were made.
    """

    tried: tuple[Tried, ...] = ()
    following: Mapping[str, Any] | None = None
    is_over: bool = False
    switches: int = 0

    def in_order(self) -> list[Mapping[str, Any]]:
        """The plan to go on with, then those that were measured, fastest first."""
        fastest = [one.plan for one in sorted(self.tried, key=lambda one: one.step_seconds)]
        return [*((self.following,) if self.following else ()), *fastest]

    def save(self, run_directory: Path) -> None:
        """Replace the file."""
        write_json(run_directory / TUNING_FILE, asdict(self))

    @classmethod
    def load(cls, run_directory: Path) -> Tuning | None:
        """What the file holds; None where there is none."""
        path = run_directory / TUNING_FILE
        if not path.exists():
            return None
        raw = json.loads(path.read_text())
        return cls(**{**raw, "tried": tuple(Tried(**one) for one in raw["tried"])})
