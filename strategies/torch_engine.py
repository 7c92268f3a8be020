"""The engine of the strategies that need only torch: single, DDP and FSDP2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.trace.checkpointing import checkpoint_activations
from strategies import checkpoint
from strategies.base import Engine, Scheduler, Strategy, TrainingParts
from strategies.checkpoint_origin import require_readable
from strategies.optimizers import OPTIMIZERS, ParameterMove, trainable_parameters
from strategies.precision import cast_model, grad_scaler


class TorchStrategy(Strategy):
    """A strategy that wraps the module and leaves loss, optimizer and loop to `TorchEngine`."""

    def engine(self, parts: TrainingParts) -> TorchEngine:
        parameters = trainable_parameters(parts.model, parts.model_parameters)
        move = ParameterMove(parts.model)
        model = cast_model(parts.model, self.configuration.precision)
        checkpoint_activations(model, self.configuration.activation_checkpointing)
        module = self.wrap(model)
        optimizer = self._optimizer(parts, move.parameters(model, parameters))
        if optimizer is parts.optimizer:
            move.optimizer(model, optimizer)
        return TorchEngine(strategy=self, module=module, optimizer=optimizer, parts=parts)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The model placed on this rank's device and spread over the ranks.

        The model's own parameter names stay valid on `model`, whatever is put around it.
        """

    def synchronization(self, module: nn.Module, *, reduces: bool) -> AbstractContextManager[object]:
        """What surrounds a forward pass: whether its backward pass reduces gradients over the ranks."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """What surrounds a forward pass: the casts of the plan's precision, unless the wrapper does them."""
        return nullcontext()

    def _optimizer(self, parts: TrainingParts, parameters: list[Any]) -> torch.optim.Optimizer:
        if isinstance(parts.optimizer, torch.optim.Optimizer):
            return parts.optimizer
        make = parts.optimizer or OPTIMIZERS[self.configuration.optimizer]
        return make(parameters)


class TorchEngine(Engine):
    """Accumulates, scales, clips and steps as DeepSpeed's engine does, over any torch strategy."""

    def __init__(
        self, *, strategy: TorchStrategy, module: nn.Module, optimizer: torch.optim.Optimizer, parts: TrainingParts
    ) -> None:
        super().__init__(parts.plan, strategy.environment)
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler_of(parts, optimizer)
        self.gradient_clipping = parts.gradient_clipping
        self._scaler = grad_scaler(self.configuration.precision, self.device)
        self._micro_steps = 0
        self._global_steps = 0

    @property
    def global_steps(self) -> int:
        return self._global_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._micro_steps + 1) % self.configuration.gradient_accumulation_steps == 0

    def save_checkpoint(self, directory: str | Path, client_state: Mapping[str, Any] | None = None) -> Path:
        progress = {
            "global_steps": self._global_steps,
            "scaler": self._scaler.state_dict(),
            "scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
        }
        content = checkpoint.Content(progress=progress, client_state=dict(client_state or {}))
        return checkpoint.save(Path(directory), self.module, self.optimizer, content)

    def load_checkpoint(self, directory: str | Path) -> tuple[Path | None, dict[str, Any]]:
        require_readable(Path(directory), self.configuration)
        found = checkpoint.load(Path(directory), self.module, self.optimizer)
        if found is None:
            return None, {}
        path, content = found
        self._global_steps = content.progress["global_steps"]
        self._micro_steps = 0
        self._scaler.load_state_dict(content.progress["scaler"] or self._scaler.state_dict())
        if self.lr_scheduler is not None and content.progress["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(content.progress["scheduler"])
        return path, content.client_state

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        reduces = self.is_gradient_accumulation_boundary()
        with self.strategy.synchronization(self.module, reduces=reduces), self.strategy.autocast():
            return self.module(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = self._scaler.scale(loss / self.configuration.gradient_accumulation_steps)
        torch.autograd.backward(scaled)

    def _step(self) -> None:
        acts = self.is_gradient_accumulation_boundary()
        self._micro_steps += 1
        if not acts:
            return
        if self.gradient_clipping > 0:
            self._scaler.unscale_(self.optimizer)
            self._clip()
        if self._optimizer_stepped() and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # The whole module, not the optimizer: parameters that it does not train have gradients too.
        self.module.zero_grad(set_to_none=True)
        self._global_steps += 1

    def _clip(self) -> None:
        with_gradients = [p for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in with_gradients if p.grad is not None])
        # A sharded norm must become one number before it meets gradients that are laid out differently.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(with_gradients, self.gradient_clipping, norm)

    def _optimizer_stepped(self) -> bool:
        """Step; False where fp16 gradients overflowed and the scaler skipped the step and lowered its scale."""
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale


def scheduler_of(parts: TrainingParts, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    """The script's scheduler, made from the optimizer where it is a function."""
    given = parts.lr_scheduler
    if given is None or isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return given
    return given(optimizer)
