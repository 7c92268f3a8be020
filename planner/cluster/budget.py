"""The budget of a training (prices, tokens to train, deadline) and a plan's bill."""

from __future__ import annotations

import math

from hardware_db.records import dataclass
from planner.types.job import Workload
from planner.types.plan import Configuration

DAY = 86_400.0
HOUR = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of money and time.

    `usd_per_gpu_hour` stands in for the price that the cluster has, `tokens` are those of the whole training, of which
    `deadline_days` is the time for.
    """

    usd_per_gpu_hour: float | None = None
    tokens: float | None = None
    deadline_days: float | None = None

    def step_limit(self, workload: Workload) -> float:
        """Seconds that a step may take for the training to end in time; infinite without a deadline."""
        if self.tokens is None or self.deadline_days is None:
            return math.inf
        return self.deadline_days * DAY / self.tokens * tokens_per_step(workload)


NO_BUDGET = Budget()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The costs of a plan: per million tokens, and for the whole training where its tokens were given.

    Dollars are None where no price is known, days and totals where no number of tokens is.
    """

    gpu_hours_per_million_tokens: float
    usd_per_million_tokens: float | None = None
    days: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None


def tokens_per_step(workload: Workload) -> int:
    """Positions that one optimizer step sees (patches of images, decoder tokens of encoder-decoders)."""
    return workload.global_batch_size * workload.sequence_length


def bill_of(configuration: Configuration, step_seconds: float, price: float | None, budget: Budget) -> Bill:
    """Return the bill of a configuration whose step takes `step_seconds`, at `price` dollars per GPU-hour."""
    per_step = configuration.global_batch_size * configuration.sequence_length
    million = step_seconds * configuration.world_size / HOUR / per_step * 1e6
    hours = None if budget.tokens is None else million * budget.tokens / 1e6
    return Bill(
        gpu_hours_per_million_tokens=million,
        usd_per_million_tokens=None if price is None else million * price,
        days=None if budget.tokens is None else budget.tokens / per_step * step_seconds / DAY,
        gpu_hours=hours,
        usd=None if hours is None or price is None else hours * price,
    )
