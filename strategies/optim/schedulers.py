"""Learning-rate schedules by DeepSpeed's names, with its meaning of every parameter, on torch's schedulers.

Schedules count optimizer steps. Under DeepSpeed's, the first step of training has the rate a scheduler starts with and
step n + 1 the rate of iteration n, from 0 on; `last_epoch` of torch is that iteration plus one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from strategies.errors import CannotRun

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


class Schedule(LRScheduler):
    """A rate for every group from the number of steps done. Its state is JSON."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.starting = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the groups in the next step, as torch asks for them."""
        return [self._rate(group, self.last_epoch) for group in range(len(self.optimizer.param_groups))]

    @abstractmethod
    def _rate(self, group: int, steps: int) -> float:
        """Return the rate of a group after so many steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs; the settings are the script's to give again."""
        return {"last_epoch": self.last_epoch, "starting": self.starting, "_last_lr": [float(r) for r in self._last_lr]}

    def per_group(self, value: PerGroup, name: str) -> list[float]:
        """Return a value for each group.

        Raises:
            CannotRun: a list has another length.
        """
        groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise CannotRun(f"scheduler: {name} has {len(values)} values for {groups} parameter groups; give one each")
        return values


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (the optimizer's own where it is left out) in `warmup_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.optimizer = optimizer
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        self.low = self.per_group(warmup_min_lr, "warmup_min_lr")
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.high = own if warmup_max_lr is None else self.per_group(warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer)

    def _rate(self, group: int, steps: int) -> float:
        low, high = self.low[group], self.high[group]
        return low + (high - low) * self._part(steps - 1) if steps else low

    def _part(self, iteration: int) -> float:
        """Return the share of the way from the lower rate to the higher."""
        return self.warmup.part(iteration)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then in a straight line to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = _whole_number(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _part(self, iteration: int) -> float:
        if iteration < self.warmup.steps:
            return self.warmup.part(iteration)
        return max(0.0, (self.total - iteration) / max(1.0, self.total - self.warmup.steps))


class WarmupCosineLR(Schedule):
    """The optimizer's own rate times a part: up from `warmup_min_ratio`, then along a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.total = _whole_number(total_num_steps, "total_num_steps")
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        self.low, self.end = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer)

    def _rate(self, group: int, steps: int) -> float:
        # DeepSpeed starts at zero, not at `warmup_min_ratio`.
        return self.starting[group] * self._part(steps - 1) if steps else 0.0

    def _part(self, iteration: int) -> float:
        """Return the share of the optimizer's own rate."""
        if iteration < self.warmup.steps:
            return self.low + (1 - self.low) * self.warmup.part(iteration)
        after = iteration - self.warmup.steps + 1
        progress = min(1.0, after / max(1, self.total - self.warmup.steps))
        return max(0.0, self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2)


class LRRangeTest(Schedule):
    """A rate that grows without end, to find the largest that trains (Smith 2018, arXiv:1803.09820)."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.low = self.per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.size = _whole_number(lr_range_test_step_size, "lr_range_test_step_size")
        self.slope, self.in_stairs = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer)

    def _rate(self, group: int, steps: int) -> float:
        intervals = steps // self.size if self.in_stairs else steps / self.size
        return self.low[group] * (1 + self.slope * intervals)


class Warmup:
    """The way up: in a straight line, or fast at first (`log`)."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise CannotRun(f"scheduler: warmup_type is {kind!r}; it must be log or linear")
        self.steps = max(2, _whole_number(steps, "warmup_num_steps"))
        self.kind = kind

    def part(self, iteration: int) -> float:
        """Return the share of the way up, 0 to 1."""
        if iteration >= self.steps:
            return 1.0
        return math.log(iteration + 1) / math.log(self.steps) if self.kind == "log" else iteration / self.steps


class LinearWarmup(Schedule):
    """`linear`: the optimizer's own rate, reached in a straight line, then down to `min_ratio` of it."""

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int, warmup_num_steps: int = 0, min_ratio: float = 0.0
    ) -> None:
        self.total = _whole_number(total_num_steps, "total_num_steps")
        self.up = _whole_number(warmup_num_steps, "warmup_num_steps", 0)
        self.end = min_ratio
        super().__init__(optimizer)

    def _rate(self, group: int, steps: int) -> float:
        if steps < self.up:
            return self.starting[group] * steps / self.up
        progress = min(1.0, (steps - self.up) / max(1, self.total - self.up))
        return self.starting[group] * (self.end + (1 - self.end) * self._remains(progress))

    def _remains(self, progress: float) -> float:
        """Return what is left of the rate after this share of the way down, 1 to 0."""
        return 1 - progress


class CosineWarmup(LinearWarmup):
    """`cosine`: as `linear`, down along half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983)."""

    def _remains(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


class ConstantWarmup(Schedule):
    """`constant`: the optimizer's own rate, reached in a straight line."""

    def __init__(self, optimizer: Optimizer, warmup_num_steps: int = 0) -> None:
        self.up = _whole_number(warmup_num_steps, "warmup_num_steps", 0)
        super().__init__(optimizer)

    def _rate(self, group: int, steps: int) -> float:
        return self.starting[group] * min(1.0, steps / self.up if self.up else 1.0)


def _whole_number(value: object, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise CannotRun(f"scheduler: {name} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


_SECOND_BETA = 0.99
"""DeepSpeed sets Adam's second beta to it while it cycles the first."""


class OneCycle(Schedule):
    """Rates up and down once and then slowly down, the betas the other way round (arXiv:1803.09820).

    Sizes are optimizer steps; 0 stairs are a smooth line, and a `decay_step_size` of 0 is no decay. The second half is
    as the first where it is not given. The first betas of an optimizer that has any are cycled too.

    Raises:
        CannotRun: a half is not longer than nothing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        up, stairs = cycle_first_step_size, cycle_first_stair_count
        down = up if cycle_second_step_size is None else cycle_second_step_size
        if up <= 0 or down < 0:
            raise CannotRun(f"scheduler: OneCycle goes up for {up} steps and down for {down}; give positive numbers")
        self.up, self.down, self.decay_size = up, down, decay_step_size
        self.stairs = (stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count)
        self.decay, self.decay_momentum = decay_lr_rate, decay_mom_rate
        self.low = self.per_group(cycle_min_lr, "cycle_min_lr")
        self.high = self.per_group(cycle_max_lr, "cycle_max_lr")
        self.has_momentum = cycle_momentum and "betas" in optimizer.defaults
        if self.has_momentum:
            self.low_momentum = self.per_group(cycle_min_mom, "cycle_min_mom")
            self.high_momentum = self.per_group(cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer)

    def _height(self, step: int) -> float:
        """Return the share of the way up, 0 to 1."""
        at = step % (self.up + self.down)
        rises = at <= self.up
        part = at / self.up if rises else (self.up + self.down - at) / self.down
        stairs = self.stairs[0 if rises else 1]
        return math.floor(part * stairs) / stairs if stairs > 0 else part

    def _decays(self, step: int) -> float | None:
        """Return the decay intervals since the cycle ended, or None while it lasts."""
        total = self.up + self.down
        if step - 1 < total:
            return None
        return (step - total) / self.decay_size if self.decay_size else 0.0

    def _rate(self, group: int, steps: int) -> float:
        low, intervals = self.low[group], self._decays(steps)
        if intervals is None:
            return low + (self.high[group] - low) * self._height(steps)
        return low / (1 + self.decay * intervals)

    def _momentum(self, group: int, steps: int) -> float:
        """Return Adam's first beta: high where the rate is low; after the cycle it grows by `decay_mom_rate`."""
        low, high, intervals = self.low_momentum[group], self.high_momentum[group], self._decays(steps)
        if not steps:
            return low  # DeepSpeed starts here, though the rate is low as well
        if intervals is None:
            return high - (high - low) * self._height(steps)
        return high * (1 + self.decay_momentum * intervals)

    def step(self, epoch: int | None = None) -> None:
        """Set the next rates, and the betas with them."""
        super().step(epoch)
        if self.has_momentum:
            for number, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (self._momentum(number, self.last_epoch), _SECOND_BETA)
