"""Lion: steps of one size in the direction of the sign of a momentum (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.torch_compat.tensors import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


class Lion(Optimizer):
    """Algorithm 2 of the paper, with weight decay apart from the gradient. One state, `exp_avg`, of each parameter.

    Args:
        params: parameters or groups.
        lr: the size of every step; 3 to 10 times smaller than AdamW's, as the paper advises.
        betas: of the direction stepped in, and of the momentum kept.
        weight_decay: 3 to 10 times larger than AdamW's.

    Raises:
        ValueError: a number is out of its range, as torch's optimizers raise it.
    """

    whole_tensors = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must be at least 0, betas {betas} in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients: list[Tensor] = [p.grad for p in parameters]
        momenta = [self._momentum(p) for p in parameters]
        lr, (ahead, kept) = float(group["lr"]), group["betas"]
        # The temporaries are one tensor per parameter, freed at the end: as torch's foreach optimizers have.
        direction = foreach_lerp(momenta, gradients, 1 - ahead)
        foreach_sign_(direction)
        if group["weight_decay"]:
            foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        foreach_add_(parameters, direction, alpha=-lr)
        foreach_lerp_(momenta, gradients, 1 - kept)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum
