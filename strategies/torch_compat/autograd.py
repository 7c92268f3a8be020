"""Backward passes: their end, what they keep, their halves, and graphs of both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.utils import clip_grad

from strategies.torch_compat.replacing import Undo, replace


def call_after_backward(callback: Callable[[], object]) -> None:
    """Call something when the backward pass ends that is running."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """Return whether somebody handles what forward passes save for backward, as activation checkpointing does.

    A torch that cannot tell is taken to have them.
    """
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


clip_norm, clip_value = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_
"""torch's own, also where `replace_gradient_functions` has put others."""
unscale_gradients: Callable[..., dict[torch.device, torch.Tensor]] = torch.amp.GradScaler._unscale_grads_
"""torch's own: (scaler, optimizer, inv_scale, found_inf, allow_fp16)."""
plain_linear: Any = torch._C._nn.linear
"""`torch.nn.functional.linear`, which DeepSpeed's stage 3 replaces for its whole process."""


def replace_gradient_functions(
    *, clip_norm: Callable[..., Any], clip_value: Callable[..., Any], unscale: Callable[..., Any]
) -> Undo:
    """Put other functions where scripts that import them later, or call them by their modules, find torch's.

    Returns:
        What puts torch's back.
    """
    clips = {"clip_grad_norm_": clip_norm, "clip_grad_value_": clip_value}
    scaler: Any = torch.amp.GradScaler
    undos = [replace(clip_grad, **clips), replace(nn.utils, **clips), replace(scaler, _unscale_grads_=unscale)]

    def undo() -> None:
        for restore in undos:
            restore()

    return undo


def backward_of_input(
    output: torch.Tensor, gradient: torch.Tensor | None, given: torch.Tensor, weights: Iterator[nn.Parameter]
) -> Any:
    """Run the half of a stage's backward pass that gives its input a gradient.

    Returns:
        What `backward_of_weights` needs to run the other half.
    """
    run: Any = import_module("torch.distributed.pipelining._backward").stage_backward_input
    _, groups = run([output], None if gradient is None else [gradient], [given], weights)
    return groups


def backward_of_weights(weights: Iterator[nn.Parameter], groups: Any) -> None:
    """Run the half of a stage's backward pass that gives its weights gradients."""
    run: Any = import_module("torch.distributed.pipelining._backward").stage_backward_weight
    run(weights, groups)


def pass_of(action: Any) -> str:
    """Return the letters of what an action of torch's pipeline schedules computes, as `F` and `B`.

    They are the value of the enumeration, and were its string while the values were numbers (torch 2.9).
    """
    kind = action.computation_type
    return kind.value if isinstance(kind.value, str) else str(kind)


def partition_as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as torch.compile partitions it into forward and backward, operation by operation."""
    return import_module("torch._functorch.aot_autograd").aot_function(  # type: ignore[no-any-return]
        function,
        fw_compiler=_unchanged,
        bw_compiler=_unchanged,
        partition_fn=import_module("torch._functorch.partitioners").min_cut_rematerialization_partition,
        decompositions=import_module("torch._inductor.decomposition").select_decomp_table(),
    )


def _unchanged(graph: Any, _example: Sequence[Any]) -> Any:
    return graph
