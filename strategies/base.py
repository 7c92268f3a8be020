"""Engine and Strategy: what a training script holds, and what makes it for one way of spreading a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner.plan import Configuration, Plan
from strategies.config import ScriptConfig
from strategies.environment import Environment

if TYPE_CHECKING:
    from strategies.monitor import RunMonitor

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
Scheduler = torch.optim.lr_scheduler.LRScheduler
SchedulerFactory = Callable[[torch.optim.Optimizer], Scheduler]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What the script brought to `initialize`, plus the plan that was settled on.

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


class Strategy(ABC):
    """One way of spreading a model over ranks; makes the engine that trains it."""

    def __init__(self, configuration: Configuration, environment: Environment) -> None:
        self.configuration = configuration
        self.environment = environment

    @abstractmethod
    def engine(self, parts: TrainingParts) -> Engine:
        """Place the model and its optimizer and return the engine that trains them."""


class Engine(ABC):
    """A model in training: call it, `backward` the loss, `step`. The same calls under every strategy.

    `step` is called after every `backward`; it changes the weights once per `gradient_accumulation_steps` calls.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Scheduler | None

    def __init__(self, plan: Plan, environment: Environment) -> None:
        self.plan = plan
        self.environment = environment
        self.monitor: RunMonitor | None = None

    @property
    def configuration(self) -> Configuration:
        return self.plan.configuration

    @property
    def device(self) -> torch.device:
        return self.environment.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.environment.is_main

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass under the plan's precision."""
        if self.monitor is not None and self.module.training:
            self.monitor.forward_starts(self.module, (args, kwargs))
        return self._forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients; the loss is divided by the accumulation steps here, not by the caller."""
        if self.monitor is not None:
            self.monitor.loss_is(loss)
        self._backward(loss)

    def step(self) -> None:
        """At the accumulation boundary: clip, change the weights, clear gradients, step the scheduler. Else nothing."""
        acts = self.is_gradient_accumulation_boundary()
        self._step()
        if acts and self.monitor is not None:
            self.monitor.step_ended()

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode."""
        return self.train(False)

    @property
    @abstractmethod
    def global_steps(self) -> int:
        """Optimizer steps so far, over all runs that this one resumed."""

    @abstractmethod
    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` changes the weights."""

    @abstractmethod
    def save_checkpoint(self, directory: str | Path, client_state: Mapping[str, Any] | None = None) -> Path:
        """Write model, optimizer, scheduler, counters and `client_state` below `directory`; called on every rank.

        The checkpoint appears whole or not at all, and `latest` names it only then.
        """

    @abstractmethod
    def load_checkpoint(self, directory: str | Path) -> tuple[Path | None, dict[str, Any]]:
        """Restore the latest checkpoint below `directory`; called on every rank.

        Returns its path and the `client_state` it was saved with, or (None, {}) where there is no checkpoint.
        """

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None: ...

    @abstractmethod
    def _step(self) -> None: ...
