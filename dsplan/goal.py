"""A person's goal for the plans, under the names of the command line's flags, on its way to the planner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.handed_in import shown
from hardware_db.units import parse_count
from planner import limits
from planner import vocabulary as words
from planner.cluster.budget import Budget
from planner.errors import ContradictoryRequest

_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """How plans are ranked and which are shown; a field is named as its flag.

    `price` is dollars per GPU-hour, `tokens` those of the whole training, as a number or such as 300B, `deadline` the
    time for them, such as 36h, 14d or 2w. `backend` runs ZeRO, None leaves it to what the device
    has; with `offload` only plans count that offload so.
    """

    objective: words.Objective = "throughput"
    top: int = 5
    fastest: bool = False
    price: float | None = None
    tokens: str | float | None = None
    deadline: str | None = None
    pareto: bool = False
    backend: words.Backend | None = None
    offload: words.Offload | None = None
    all_plans: bool = False

    def ranking(self) -> dict[str, Any]:
        """The fields of the planner's request that say the same.

        Raises:
            ContradictoryRequest: tokens or deadline are not what they should be, or there is a deadline for no tokens.
        """
        return {
            "objective": self.objective,
            "top": self.top,
            "allow_unrunnable": self.all_plans,
            "simplest_first": not self.fastest,
            "budget": self._budget(),
            "zero_backend": self.backend,
            "offload": self.offload,
        }

    def _budget(self) -> Budget:
        if self.deadline is not None and self.tokens is None:
            raise ContradictoryRequest(f"--deadline {self.deadline} needs the tokens of the training: --tokens 300B")
        limits.USD_PER_HOUR.check("--price", self.price)
        limits.PLANS.check("--top", self.top)
        return Budget(
            usd_per_gpu_hour=self.price,
            tokens=None if self.tokens is None else _tokens(self.tokens),
            deadline_days=None if self.deadline is None else _days(self.deadline),
        )


def _tokens(given: str | float) -> float:
    try:
        tokens = parse_count(given) if isinstance(given, str) else given
    except DsplanError:
        tokens = 0
    if not limits.TRAINING_TOKENS.allows(tokens):
        raise ContradictoryRequest(f"--tokens {shown(given)} is not a number of tokens; write 20M, 300B or 1.5T")
    return float(tokens)


def _days(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([hdw])\s*", text)
    days = float(match[1]) * _DAYS[match[2]] if match else 0.0
    if not limits.DAYS.allows(days):
        raise ContradictoryRequest(
            f"--deadline {shown(text)} is not a length of time; write hours, days or weeks: 36h, 14d, 2w"
        )
    return days
