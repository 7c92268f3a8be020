"""OneCycle: up and down once, with the momentum the other way round, then a slow decay (arXiv:1803.09820)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from strategies.errors import CannotRun
from strategies.schedulers import PerGroup, Schedule

_SECOND_BETA = 0.99
"""What DeepSpeed sets Adam's second beta to while it cycles the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    """The shape of the cycle, in optimizer steps; 0 stairs is a smooth line, 0 `decay` steps no decay."""

    up: float
    down: float
    stairs_up: int = 0
    stairs_down: int = 0
    decay: float = 0

    def height(self, step: int) -> float:
        """How far up, 0 to 1."""
        total = self.up + self.down
        at = step % total
        rises = at <= self.up
        part = at / self.up if rises else (total - at) / self.down
        stairs = self.stairs_up if rises else self.stairs_down
        return math.floor(part * stairs) / stairs if stairs > 0 else part

    def decays(self, step: int) -> float | None:
        """Decay intervals since the cycle ended; None while it lasts."""
        total = self.up + self.down
        if step - 1 < total:
            return None
        return (step - total) / self.decay if self.decay else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """Adam's first beta: high where the rate is low; afterwards it grows by `decay` per interval."""

    low: list[float]
    high: list[float]
    decay: float

    def value(self, group: int, cycle: Cycle, step: int) -> float:
        """The beta of a group."""
        low, high, intervals = self.low[group], self.high[group], cycle.decays(step)
        if not step:
            return low  # DeepSpeed starts here, though the rate is low as well
        return high - (high - low) * cycle.height(step) if intervals is None else high * (1 + self.decay * intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCycleSettings:
    """DeepSpeed's parameters of OneCycle; the second half is as the first where it is not given."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def cycle(self) -> Cycle:
        """The shape.

        Raises:
            CannotRun: a half is not longer than nothing.
        """
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        down = up if self.cycle_second_step_size is None else self.cycle_second_step_size
        if up <= 0 or down < 0:
            raise CannotRun(f"scheduler: OneCycle goes up for {up} steps and down for {down}; give positive numbers")
        stairs_down = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        return Cycle(up=up, down=down, stairs_up=stairs, stairs_down=stairs_down, decay=self.decay_step_size)


class OneCycle(Schedule):
    """Rates by the cycle, and the betas of optimizers that have them."""

    def __init__(self, optimizer: Optimizer, settings: OneCycleSettings) -> None:
        self.optimizer = optimizer
        self.cycle, self.decay = settings.cycle(), settings.decay_lr_rate
        self.low = self.per_group(settings.cycle_min_lr, "cycle_min_lr")
        self.high = self.per_group(settings.cycle_max_lr, "cycle_max_lr")
        self.momentum: Momentum | None = None
        if settings.cycle_momentum and "betas" in optimizer.defaults:
            self.momentum = Momentum(
                low=self.per_group(settings.cycle_min_mom, "cycle_min_mom"),
                high=self.per_group(settings.cycle_max_mom, "cycle_max_mom"),
                decay=settings.decay_mom_rate,
            )
        super().__init__(optimizer)

    def rate(self, group: int, steps: int) -> float:
        low, intervals = self.low[group], self.cycle.decays(steps)
        if intervals is None:
            return low + (self.high[group] - low) * self.cycle.height(steps)
        return low / (1 + self.decay * intervals)

    def step(self, epoch: int | None = None) -> None:
        """The next rates, and the betas with them."""
        super().step(epoch)
        if self.momentum is None:
            return
        for number, group in enumerate(self.optimizer.param_groups):
            group["betas"] = (self.momentum.value(number, self.cycle, self.last_epoch), _SECOND_BETA)


def one_cycle(optimizer: Optimizer, **params: Any) -> OneCycle:
    """A OneCycle from DeepSpeed's parameters."""
    return OneCycle(optimizer, OneCycleSettings(**params))
