"""A run whose losses or gradients stay NaN or infinite ends, instead of spending days on nothing."""

from __future__ import annotations

import math
from typing import Any

import torch

from strategies.supervision.failures import NotFinite

STEPS_IN_A_ROW = 20
"""As many bad steps end a rank; those in which a loss scale is on its way down from 2^16 do not count."""
_LOOK_EVERY = 5


class FiniteWatch:
    """Counts steps in a row whose last loss on this rank, or whose gradients, were not finite.

    Losses are counted where they lie; the count of a GPU is read now and then, because reading waits for it.
    """

    def __init__(self, engine: Any, limit: int = STEPS_IN_A_ROW, *, sees_gradients: bool = True) -> None:
        self._engine, self._limit = engine, limit
        self._loss: torch.Tensor | None = None
        self._bad_losses = 0
        self._on_device: torch.Tensor | None = None
        self._bad_gradients = 0
        self._steps = 0
        # An engine of our own leaves no norm where it was not finite; DeepSpeed's has none for other reasons too.
        self._sees_gradients = sees_gradients and engine.configuration.backend != "deepspeed"

    @property
    def is_clean(self) -> bool:
        """True if the last step was finite: what is saved after it is worth resuming from."""
        on_device = 0 if self._on_device is None else int(self._on_device.item())
        return self._bad_gradients + self._bad_losses + on_device == 0

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss."""
        self._loss = loss.detach()

    def step_ended(self) -> None:
        """Count the step.

        Raises:
            NotFinite: the limit is reached.
        """
        self._steps += 1
        self._count_gradients()
        losses = self._count_losses()
        if max(losses, self._bad_gradients) >= self._limit:
            what = "losses" if losses >= self._limit else "gradients"
            count = max(losses, self._bad_gradients)
            raise NotFinite(
                f"{what} of the last {count} steps are NaN or infinite, up to step {self._engine.global_steps};"
                " lower the learning rate, clip gradients, or look at the samples of those steps"
            )

    def _count_gradients(self) -> None:
        if not self._sees_gradients:
            return
        is_bad = self._engine.gradient_norm is None
        # A loss scale above 1 is being searched for: gradients that overflow under it are expected.
        searching = is_bad and self._engine.loss_scale > 1
        self._bad_gradients = self._bad_gradients + 1 if is_bad and not searching else 0

    def _count_losses(self) -> int:
        """Count bad losses in a row; 0 between two readings of a GPU."""
        loss, self._loss = self._loss, None
        if loss is None:
            return 0
        if loss.device.type == "cpu":
            value = loss.item() if loss.dim() == 0 else float(loss.sum())
            self._bad_losses = 0 if math.isfinite(value) else self._bad_losses + 1
            return self._bad_losses
        return self._count_on_device(loss)

    def _count_on_device(self, loss: torch.Tensor) -> int:
        is_bad_there = (~torch.isfinite(loss)).any()
        if self._on_device is None:
            self._on_device = torch.zeros((), dtype=torch.int64, device=loss.device)
        self._on_device = (self._on_device + 1) * is_bad_there
        return int(self._on_device.item()) if self._steps % _LOOK_EVERY == 0 else 0
