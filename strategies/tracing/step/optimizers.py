"""The plan's optimizers for a trace: torch's own where torch has them, else their states and temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner.vocabulary import Optimizer
from strategies.tracing.step.refusal import TraceFailed

_SMALLEST_8BIT = 4096
_VALUES_PER_SCALE = 256


def make_optimizer(name: Optimizer, parameters: Iterable[torch.nn.Parameter], *, on_cpu: bool) -> torch.optim.Optimizer:
    """The optimizer that the plan's word means on a GPU or on a CPU, where torch takes no foreach form by itself.

    Raises:
        TraceFailed: its states or its step are left to the closed forms.
    """
    foreach = not on_cpu
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda given: torch.optim.AdamW(given, foreach=foreach),
        "adamw-fused": lambda given: torch.optim.AdamW(given, fused=True),
        "adamw-forloop": lambda given: torch.optim.AdamW(given, foreach=False),
        "adamw-8bit": Adam8bit,
        "sgd": lambda given: torch.optim.SGD(given, foreach=foreach),
        "adafactor": torch.optim.Adafactor,
        "lion": Lion,
    }
    if name not in makers:
        raise TraceFailed("", "", f"optimizer {name} is not traced")
    return makers[name](list(parameters))


def host_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """States that torch keeps in host memory on a GPU: step counts, unless a fused kernel reads them."""
    if optimizer.defaults.get("fused"):
        return []
    return [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), torch.Tensor)]


class Adam8bit(torch.optim.Optimizer):
    """What bitsandbytes' 8-bit Adam keeps (`optim/optimizer.py`): two moments of one byte with an fp32 scale per 256
    values, fp32 moments for small tensors. Its kernel needs no temporaries."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _moments_8bit(_local(parameter))
        return None


def _moments_8bit(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    elements = parameter.numel()
    if elements < _SMALLEST_8BIT:
        return {name: torch.empty(elements, dtype=torch.float32) for name in ("state1", "state2")}
    scales = -(-elements // _VALUES_PER_SCALE)
    moments = {name: torch.empty(elements, dtype=torch.uint8) for name in ("state1", "state2")}
    return moments | {name: torch.empty(scales, dtype=torch.float32) for name in ("absmax1", "absmax2")}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2, written as the package lion-pytorch does: one moment, and per
    tensor a copy of it and the sum with the gradient."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = average.clone().mul_(first).add(parameter.grad, alpha=1 - first).sign_()
                parameter.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(parameter.grad, alpha=1 - second)
        return None


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """A sharded parameter's own part."""
    to_local: Callable[[], torch.Tensor] | None = getattr(parameter, "to_local", None)
    return to_local() if to_local is not None else parameter
