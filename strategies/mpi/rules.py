"""How one step changes parameters: element by element, so that a rank can step any run of them alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from strategies.errors import CannotRun
from strategies.mpi.arrays import Array


class UpdateRule(Protocol):
    """An elementwise optimizer. `states` are the names of its arrays per parameter, which begin as zeros."""

    @property
    def name(self) -> str: ...

    @property
    def states(self) -> tuple[str, ...]: ...

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """Change `value` and `states` in place; all are flat, of one length; `step` counts from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay, as `torch.optim.AdamW` (arXiv:1711.05101); without decay it is Adam.

    Raises:
        CannotRun: a number is out of its range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "adamw"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise CannotRun(f"betas are {self.betas}; each is at least 0 and below 1")
        _require_at_least_zero("eps", self.eps)
        _require_at_least_zero("weight_decay", self.weight_decay)

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """As `UpdateRule.update`."""
        first, second = states["exp_avg"], states["exp_avg_sq"]
        beta1, beta2 = self.betas
        first += (1 - beta1) * (gradient - first)
        second *= beta2
        second += (1 - beta2) * np.square(gradient)
        spread = np.sqrt(second)
        spread /= math.sqrt(1 - beta2**step)
        spread += self.eps
        value *= 1 - learning_rate * self.weight_decay
        value -= learning_rate / (1 - beta1**step) * first / spread


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Gradient descent as `torch.optim.SGD`: heavy-ball momentum, weight decay added to the gradient.

    Raises:
        CannotRun: a number is out of its range.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        _require_at_least_zero("momentum", self.momentum)
        _require_at_least_zero("weight_decay", self.weight_decay)

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """As `UpdateRule.update`."""
        direction = gradient + self.weight_decay * value if self.weight_decay else gradient
        if self.momentum:
            held = states["momentum"]
            held *= self.momentum
            held += direction
            direction = held
        value -= learning_rate * direction


def _require_at_least_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise CannotRun(f"{name} is {value}; it must be a number of at least 0")
