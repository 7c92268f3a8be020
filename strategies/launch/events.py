"""What happens during a run, as values that a view can draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLine:
    """A line a rank wrote."""

    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMade:
    """The plan in use, as the dictionary of the JSON contract."""

    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One optimizer step on rank 0. `samples` and `tokens` are those of rank 0's own batches in this step."""

    step: int
    loss: float | None
    seconds: float
    samples: int
    tokens: int
    peak_bytes: int
    rss_bytes: int


Event = OutputLine | PlanMade | StepDone
