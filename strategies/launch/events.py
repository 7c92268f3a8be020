"""What happens during a run, as values that a view can draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from strategies.monitoring.alerts import Alert

if TYPE_CHECKING:
    from strategies.launch.causes import Ending
    from strategies.launch.policy import Decision


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
    """One optimizer step on the first rank here, counted from 1 over the whole run. `samples` and `tokens` are those of
    that rank's own batches in this step."""

    step: int
    loss: float | None
    seconds: float
    samples: int
    tokens: int
    peak_bytes: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """An attempt did not complete: why, and what follows."""

    attempt: int
    ending: Ending
    decision: Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIsBack:
    """The first step after a restart is done; `seconds_lost` is None where it cannot be known."""

    step: int
    seconds_lost: float | None


Event = OutputLine | PlanMade | StepDone | Alert | AttemptEnded | RunIsBack
