"""The engine of our ZeRO: what its three stages have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from strategies.activations import apply_plan
from strategies.base import Engine, Strategy
from strategies.environment import ensure_group
from strategies.loss_scale import LossScale
from strategies.optimizer_needs import undivided
from strategies.optimizers import trainable_parameters
from strategies.precision import narrowed
from strategies.protocols import TrainingParts
from strategies.torch_engine import scheduler_of, tensors_in
from strategies.zero.checkpoint import ZeroStates
from strategies.zero.compress import wires
from strategies.zero.held import Held
from strategies.zero.latecomers import Latecomers
from strategies.zero.offload import HostGradients, offload_of
from strategies.zero.optimizer import Pieces, script_optimizer
from strategies.zero.partition import Ranks, owners_of
from strategies.zero.reduce import Reducer
from strategies.zero.settings import read_settings
from strategies.zero.stepping import Stepper
from strategies.zero.weights import Home
from strategies.zero.wire import wire_for


class ZeroStrategy(Strategy):
    """Lays the model out in buckets; a stage says which of their tensors are whole and when gradients are summed."""

    reduces_each_micro_batch: bool
    """Whether gradients are summed over ranks in every micro-batch, so that no rank holds them whole."""

    def engine(self, parts: TrainingParts) -> ZeroEngine:
        ensure_group(self.environment)
        environment, model = self.environment, parts.model
        apply_plan(parts)
        ranks = Ranks(rank=environment.rank, world_size=environment.world_size)
        optimizer = script_optimizer(parts, trainable_parameters(model, parts.model_parameters))
        settings = read_settings(parts, environment.device)
        home = Home(
            device=environment.device,
            wire=wire_for(ranks, environment.device),
            settings=settings,
            offload=offload_of(settings.offload, environment.device),
            owners=owners_of(undivided(optimizer, model.parameters()), ranks.world_size),
        )
        return ZeroEngine(strategy=self, parts=parts, home=home, held=self.hold(model, home), optimizer=optimizer)

    @abstractmethod
    def hold(self, model: nn.Module, home: Home) -> Held:
        """Place the model's weights in buckets on the device."""


class ZeroEngine(Engine):
    """Accumulates, scales, clips, skips and steps the same way in every stage."""

    gradient_norm: float | None = None
    skipped_steps: int = 0

    def __init__(
        self,
        *,
        strategy: ZeroStrategy,
        parts: TrainingParts,
        home: Home,
        held: Held,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(parts.plan, strategy.environment)
        settings = home.settings
        self.module = self.wrapped = parts.model
        self.gradient_clipping = parts.gradient_clipping
        self._home, self._held = home, held
        self._scale = LossScale(settings.scale)
        wire_of = wires(home.wire, settings.travel.codec, lambda: self._scale.value)
        self._reducer = Reducer(held.trained, wire_of, accumulate=settings.accumulate, reduce=settings.travel.dtype)
        held.follow(self._reducer)
        self.optimizer = optimizer
        self._pieces = Pieces(held.trained, home.wire, optimizer)
        self._latecomers = Latecomers(self.module, held, self._pieces, self._reducer)
        self._stepper = Stepper(optimizer, self._pieces, held, home.offload.disk)
        if home.offload.copies is not None:
            rounds = self.device.type == "cuda"
            self._reducer.host = HostGradients(home.offload.copies, settings, rounds=rounds)
        self.lr_scheduler = scheduler_of(parts, self.optimizer)
        each = strategy.reduces_each_micro_batch and self.configuration.sync_each_micro_batch
        self._reduces_each = each
        self._micro_steps = 0
        self._global_steps = 0

    @property
    def global_steps(self) -> int:
        return self._global_steps

    @property
    def loss_scale(self) -> float:
        return self._scale.value

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._micro_steps + 1) % self.configuration.gradient_accumulation_steps == 0

    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        buckets = (*self._held.trained, *self._held.fixed)
        summed = [bucket.gradient for bucket in buckets if bucket.gradient is not None]
        masters = [bucket.master for bucket in self._held.trained]
        # A part that is its own master holds weights where both have one dtype, else the wider copy.
        parts = [bucket.part for bucket in buckets if bucket.part.dtype == bucket.dtype]
        return {
            "parameters": [*parts, *self.module.parameters(), *self.module.buffers()],
            "gradients": [*summed, *self._reducer.waiting],
            "optimizer": [*masters, *tensors_in(self.optimizer.state)],
        }

    def whole_parameters(self, *, keeps_changes: bool = False) -> AbstractContextManager[object]:
        return self._held.whole(keeps_changes=keeps_changes)

    def _states(self) -> ZeroStates:
        return ZeroStates(self.module, self.optimizer, self._pieces, self._held)

    def _progress(self) -> dict[str, Any]:
        return {
            "global_steps": self._global_steps,
            "skipped_steps": self.skipped_steps,
            "scaler": self._scale.state_dict(),
        }

    def _resume(self, progress: Mapping[str, Any]) -> None:
        self._global_steps, self._micro_steps = progress["global_steps"], 0
        self.skipped_steps = progress["skipped_steps"]
        self._scale.load_state_dict(progress["scaler"])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = narrowed((args, kwargs), self._home.settings.compute)
        return self.module(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        acts = self.is_gradient_accumulation_boundary()
        self._latecomers.welcome()
        # Divided here once, gradients are means over ranks and micro-batches when they have been added up.
        parts = self.configuration.gradient_accumulation_steps * self._home.wire.ranks.world_size
        self._reducer.begin(reduces=acts or (self._reduces_each and self._may_reduce))
        with self._held.backward():
            torch.autograd.backward(loss.float() * (self._scale.value / parts))
            self._reducer.finish()

    def _step(self) -> None:
        acts = self.is_gradient_accumulation_boundary()
        self._micro_steps += 1
        if not acts:
            return
        self._latecomers.welcome()
        self._reducer.settle()
        square, used = self._pieces.agree(self._reducer.used, self.device)
        if math.isfinite(square):
            self._apply(math.sqrt(square) / self._scale.value, used)
        else:
            self.gradient_norm = None
            self.skipped_steps += 1
            self._scale.overflowed()
        self._reducer.clear()
        self._pieces.clear()
        self._clear_untrained()
        self._global_steps += 1

    def _apply(self, norm: float, used: set[nn.Parameter]) -> None:
        """Clip by the norm over all ranks, step, and bring the weights up to date."""
        self.gradient_norm = norm
        clip = min(1.0, self.gradient_clipping / (norm + 1e-6)) if self.gradient_clipping > 0 else 1.0
        self._stepper.step(used, clip / self._scale.value)
        self._scale.stepped()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _clear_untrained(self) -> None:
        """Parameters that no optimizer trains may have gradients too."""
        for parameter in self.module.parameters():
            parameter.grad = None
