"""Losses without whole logits, compiled blocks and optimizers: what a traced step runs beside a model's modules.

Nothing of Liger-Kernel or torchtitan runs here, since their kernels want a GPU: what they keep and make is written down
as autograd functions that make tensors of the same sizes in the same order (Liger-Kernel
`ops/fused_linear_cross_entropy.py`; torchtitan `components/loss.py` ChunkedLossWrapper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from planner.errors import DsplanError
from planner.vocabulary import Loss, Optimizer
from strategies.parallel.blocks import without_adapters
from strategies.torch_compat.autograd import partition_as_compiled
from strategies.tracing.step.refusal import TraceFailed

LOSS_CHUNKS = 8
"""torchtitan's and torchtune's default."""


def compute_loss_as(module: nn.Module, kind: Loss) -> None:
    """Make a causal language model's forward compute its loss in chunks of logits, or with Liger's kernel.

    Raises:
        DsplanError: the module has no head over a base model.
    """
    if kind == "plain":
        return
    unwrapped = without_adapters(module)
    base: Any = getattr(unwrapped, getattr(unwrapped, "base_model_prefix", "") or "model", None)
    if base is None or unwrapped.get_output_embeddings() is None:
        raise DsplanError(
            f"--loss {kind} is traced for models with a language head; {type(unwrapped).__name__} has none"
        )
    function = {"fused": _fused_loss, "chunked": _chunked_loss}[kind]

    def forward(input_ids: Any = None, labels: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        states = base(input_ids=input_ids, inputs_embeds=inputs_embeds, **others).last_hidden_state
        return {"loss": function(unwrapped.get_output_embeddings(), states, labels)}

    unwrapped.forward = _Forward(forward)


class _Forward:
    """A forward whose result has `.loss` and nothing else."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Output(loss=self._function(*args, **kwargs)["loss"])


class Output:
    """The result of a step that makes no logits."""

    def __init__(self, *, loss: torch.Tensor) -> None:
        self.loss = loss


def _fused_loss(head: Any, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = states.reshape(-1, states.shape[-1])
    weight = head.weight
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        rows = rows.to(dtype)
        weight = weight.to(dtype)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    loss: torch.Tensor = _FusedLinearCrossEntropy.apply(rows, weight, shifted)  # type: ignore[no-untyped-call]
    return loss


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger's loss: gradients of the states and of the head are made in forward, chunk by chunk.

    A chunk has so many rows that its logits have about the elements of the states.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, width = states.shape
        chunk = _power_of_two(math.ceil(rows / math.ceil(weight.shape[0] / width)))
        gradient = torch.zeros_like(states)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = states.new_zeros(rows, dtype=torch.float32)
        for start in range(0, rows, chunk):
            part = states[start : start + chunk]
            logits = part @ weight.t()  # the kernel writes their gradient over them
            losses[start : start + chunk] = 0.0
            gradient[start : start + chunk] = logits @ weight
            if of_weight is not None:
                of_weight += torch.mm(logits.t(), part).float()
            del logits
        ctx.save_for_backward(gradient, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, of_weight = ctx.saved_tensors
        return gradient, of_weight, None


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _chunked_loss(head: Any, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return torchtitan's loss: each chunk's backward runs before the next one's forward, into one fp32 gradient."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    gradient = torch.zeros_like(states, dtype=torch.float32)
    total = states.new_zeros((), dtype=torch.float32)
    size = math.ceil(states.shape[1] / LOSS_CHUNKS)
    leaves = [part.detach().contiguous().requires_grad_() for part in torch.split(states, size, dim=1)]
    for index, (part, target) in enumerate(zip(leaves, torch.split(shifted, size, dim=1), strict=True)):
        logits = head(part)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.reshape(-1), reduction="sum")
        del logits
        torch.autograd.backward(loss)
        total = total + loss.detach()
        del loss
        if part.grad is not None:
            gradient[:, index * size : (index + 1) * size] = part.grad
        part.grad = None
    result: torch.Tensor = _Boundary.apply(states, total, gradient.to(states.dtype))  # type: ignore[no-untyped-call]
    return result


class _Boundary(torch.autograd.Function):
    """The loss, whose backward goes on below the head."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0], None, None


# Compiled blocks.


def compile_block(block: nn.Module) -> None:
    """Make a block run as torch.compile partitions it: what is saved for backward is the smallest cut of its graph.

    The graphs run operation by operation, so that a block's own moments have tensors that fused kernels never make.
    What is alive outside of the block at work is that of the compiled one. The first call traces and is not to be
    counted.
    """
    block.forward = _Compiled(block)


class _Compiled:
    def __init__(self, block: nn.Module) -> None:
        self._block, self._eager, self._inside = block, block.forward, False
        self._names = [name for name, _ in block.named_parameters()]
        self._compiled = partition_as_compiled(self._called)

    def _called(self, weights: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        return torch.func.functional_call(self._block, dict(zip(self._names, weights, strict=True)), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._eager(*args, **kwargs)
        self._inside = True
        try:
            given = {name: value for name, value in kwargs.items() if value is not None}
            return self._compiled(list(self._block.parameters()), args, given)
        finally:
            self._inside = False


# The plan's optimizers: torch's own where torch has them, else their states and temporaries.


_SMALLEST_8BIT = 4096
_VALUES_PER_SCALE = 256


def make_optimizer(name: Optimizer, parameters: Iterable[torch.nn.Parameter], *, on_cpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer that the plan's word means on a device; on a CPU torch takes no foreach form by itself.

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
    """States that bitsandbytes' 8-bit Adam keeps (`optim/optimizer.py`); its kernel needs no temporaries.

    Two moments of one byte with an fp32 scale per 256 values, fp32 moments for small tensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Make the states that a first step leaves."""
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
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2, as the package lion-pytorch writes it.

    One moment, and per tensor a copy of it and the sum with the gradient.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step as lion-pytorch does."""
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
    """Return a sharded parameter's own part."""
    to_local: Callable[[], torch.Tensor] | None = getattr(parameter, "to_local", None)
    return to_local() if to_local is not None else parameter
