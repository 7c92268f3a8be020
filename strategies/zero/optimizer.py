"""Optimizer: any `torch.optim` class, working on this rank's pieces of the master weights.

The optimizer object stays the script's own, with its groups, options and schedulers; only the tensors in its groups are
exchanged for pieces. A piece is a run of its parameter's elements, flat, so the optimizer must work element by element,
as all of torch's do but Adafactor, LBFGS, Muon and SparseAdam.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from strategies.base import TrainingParts
from strategies.errors import CannotRun
from strategies.optimizers import OPTIMIZERS, translated
from strategies.zero.partition import Bucket, Slot
from strategies.zero.wire import Wire

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch's optimizers that are one number for the parameter, whatever its shape; a scalar's others are not."""
_NEEDS_WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Pieces:
    """Every parameter's piece on this rank: a leaf tensor that shares the master weights' memory, maybe empty."""

    def __init__(self, buckets: Iterable[Bucket], wire: Wire) -> None:
        self.buckets = tuple(buckets)
        self._wire = wire
        self.of: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                self.of[slot.parameter] = bucket.master[start:stop].detach().requires_grad_()

    def optimizer(self, parts: TrainingParts, trained: Sequence[Any]) -> torch.optim.Optimizer:
        """The script's optimizer, or the plan's, over the pieces.

        Raises:
            CannotRun: it needs whole matrices, or holds a parameter that is not the model's.
        """
        if isinstance(parts.optimizer, torch.optim.Optimizer):
            optimizer = parts.optimizer
            self._exchange(optimizer)
        else:
            make = parts.optimizer or _planned(parts)
            optimizer = make([translated(item, self._piece) for item in trained])
        if type(optimizer).__name__ in _NEEDS_WHOLE:
            raise CannotRun(
                f"optimizer {type(optimizer).__name__} needs whole matrices and ZeRO splits them; use ddp, or an"
                " optimizer that works element by element"
            )
        return optimizer

    def attach(self, used: set[nn.Parameter]) -> None:
        """Give each piece its gradient; none where no rank used the parameter, so that it stays as it is."""
        for bucket in self.buckets:
            whole = bucket.gradient
            if whole is None:
                continue
            gradient = whole.to(device=bucket.master.device, dtype=bucket.master.dtype)
            bucket.gradient = gradient
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                self.of[slot.parameter].grad = gradient[start:stop] if slot.parameter in used else None

    def detach(self) -> None:
        """Let go of the gradients."""
        for piece in self.of.values():
            piece.grad = None

    def agree(self, used: set[nn.Parameter], device: torch.device) -> tuple[float, set[nn.Parameter]]:
        """The square of the norm of all gradients, and the parameters that any rank used: one small collective.

        Not a number, or infinite, where any gradient is.
        """
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        flags = [float(slot.parameter in used) for slot in slots]
        gradients = [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]
        norms = [torch.linalg.vector_norm(one, dtype=_at_least_fp32(one.dtype)).double() for one in gradients]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        message = torch.cat((square.to(device).reshape(1), torch.tensor(flags, dtype=torch.float64, device=device)))
        values = self._wire.sum_everywhere(message).tolist()
        anywhere = {slot.parameter for slot, flag in zip(slots, values[1:], strict=True) if flag}
        return values[0], anywhere

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient; 1 costs nothing."""
        gradients = [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def slots(self) -> Iterable[tuple[Bucket, Slot]]:
        """Every parameter with its bucket."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.slots)

    def _piece(self, parameter: torch.Tensor) -> torch.Tensor:
        piece = self.of.get(parameter)  # type: ignore[call-overload]
        if piece is None and not parameter.requires_grad:
            return parameter  # frozen: the optimizer passes over it
        if piece is None:
            raise CannotRun("the optimizer holds a parameter that is not the model's; build it from this model")
        return piece  # type: ignore[no-any-return]

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Put pieces into an optimizer of whole parameters; of its states the part that belongs to the piece."""
        starts = {slot.parameter: (bucket.own_start(slot), self.of[slot.parameter]) for bucket, slot in self.slots()}
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                piece = self._piece(parameter)
                if piece is parameter:
                    continue
                state = optimizer.state.pop(parameter, None)
                if state:
                    start = starts[parameter][0]
                    optimizer.state[piece] = {
                        name: value if name in SCALARS else _cut(value, parameter, start, piece)
                        for name, value in state.items()
                    }
                group["params"][place] = piece


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cut(value: Any, parameter: torch.Tensor, start: int, piece: torch.Tensor) -> Any:
    """The piece's part of an optimizer state that has its parameter's shape; others as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return value.reshape(-1)[start : start + piece.numel()].to(device=piece.device, copy=True)


def _planned(parts: TrainingParts) -> Any:
    configuration = parts.plan.configuration
    # On the host torch's fused AdamW reads each state once where the for-loop reads them a dozen times.
    offloads = configuration.offload != "none" and configuration.optimizer in ("adamw", "adamw-fused")
    return OPTIMIZERS["adamw-fused" if offloads else configuration.optimizer]
