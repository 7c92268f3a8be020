"""EngineFeed: the figures of an engine's steps, for whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from strategies.monitoring.step_rows import StepRows
from strategies.protocols import Observer, TrainingEngine


class EngineFeed(Observer):
    """Hands the row of every step to `take`, with the learning rate and the norm of the gradients."""

    def __init__(
        self, engine: TrainingEngine, take: Callable[[Mapping[str, Any]], object], end: Callable[[], object]
    ) -> None:
        self._engine, self._take, self._end = engine, take, end
        self._rate = engine.get_lr()[0]
        self._rows = StepRows(
            engine.device,
            sequence_length=engine.configuration.sequence_length,
            global_steps=lambda: engine.global_steps,
            tracks=False,  # it slows a step down, and the run's own metrics have it
        )

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        self._rows.forward_starts(module, inputs)

    def loss_is(self, loss: torch.Tensor) -> None:
        self._rows.loss_is(loss)

    def starts(self, section: str) -> None:
        if section == "step":
            self._rate = self._engine.get_lr()[0]  # a scheduler changes it at the end of the step

    def step_ended(self) -> None:
        row = self._rows.step_ended()
        norm = self._engine.gradient_norm
        row |= {"learning_rate": self._rate, **({} if norm is None else {"gradient_norm": float(norm)})}
        if row["seconds"] > 0:
            row["samples_per_second"] = row["samples"] / row["seconds"]
        self._take(row)

    def close(self) -> None:
        self._rows.close()
        self._end()
