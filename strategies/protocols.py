"""Protocols between the parts of `strategies`: a script's objects, the engine, its observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from planner.types.plan import Configuration, Plan
from strategies.config.values import CheckpointSection, ScriptConfig
from strategies.distributed.environment import Environment

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
Scheduler = torch.optim.lr_scheduler.LRScheduler
SchedulerFactory = Callable[[torch.optim.Optimizer], Scheduler]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """Parts that the script brought to `initialize`, plus the plan that was settled on.

    `model_parameters` are what the optimizer may change (parameters or parameter groups), None for all that require
    gradients. `script` is what the script's config says.
    """

    model: nn.Module
    plan: Plan
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Scheduler | SchedulerFactory | None = None
    gradient_clipping: float = 0.0
    script: ScriptConfig = field(default_factory=ScriptConfig)


class Observer:
    """Watches an engine train; each method does nothing unless a kind of observer says otherwise."""

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Note that a training forward pass of `module` begins with positional and named `inputs`."""

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss, before its backward pass."""

    def starts(self, section: str) -> None:
        """Note that `forward`, `backward`, `step` or a section of the script begins."""

    def ends(self, section: str) -> None:
        """Note that the section has ended."""

    def step_ended(self) -> None:
        """Note that an optimizer step is over."""

    def close(self) -> None:
        """Training is over: finish files."""


class TrainingEngine(Protocol):
    """The engine as what watches, saves and supervises it sees it; `strategies.engine.base.Engine` has the words."""

    client_state: dict[str, Any]
    client_state_source: Callable[[], dict[str, Any]] | None
    counted_peak_bytes: int | None

    @property
    def observers(self) -> list[Observer]:
        """Watchers of its steps."""

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps."""

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """None where the script has none."""

    @property
    def dataloader(self) -> Any:
        """The training data, or None."""

    @property
    def plan(self) -> Plan:
        """The plan in use."""

    @property
    def configuration(self) -> Configuration:
        """The plan's configuration."""

    @property
    def checkpointing(self) -> CheckpointSection:
        """The script's wishes for checkpoints."""

    @property
    def environment(self) -> Environment:
        """The rank's place."""

    @property
    def device(self) -> torch.device:
        """The rank's device."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, over all attempts."""

    @property
    def gradient_norm(self) -> float | None:
        """That of the last step, where it was taken."""

    @property
    def skipped_steps(self) -> int:
        """Steps that a gradient that was not finite has skipped."""

    @property
    def loss_scale(self) -> float:
        """1 without one."""

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""

    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the tensors that this rank holds, by what they are."""
