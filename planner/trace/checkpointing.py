"""Activation checkpointing: which tensors a block keeps for backward and which it computes again.

The engine runs it and the trace runs it, so that both mean the same by `full` and `selective`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.errors import DsplanError
from planner.trace.blocks import repeated_blocks

# Results of matrix products and attention: costly to compute again, cheap to keep. The rest is computed again.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
_KEPT = {getattr(torch.ops.aten, name).default for name in _PRODUCTS if hasattr(torch.ops.aten, name)}


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Make the model's blocks recompute in backward: `full` everything, `selective` all but matmuls and attention.

    A Hugging Face model switches on its own checkpointing for `full`.

    Raises:
        DsplanError: no repeated block was found to checkpoint.
    """
    if kind == "none":
        return
    if kind == "full" and getattr(model, "supports_gradient_checkpointing", False):
        hugging_face: Any = model
        hugging_face.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise DsplanError(
            f"activation checkpointing {kind!r} found no stack of like blocks (a ModuleList of one class) in"
            f" {type(model).__name__}; choose 'none' or put the blocks in a ModuleList"
        )
    kept = _kept_in(model)
    for block in blocks:
        # The forward of the instance, not a module around it: parameters keep their names in checkpoints.
        block.forward = _recomputing(block.forward, kind, kept)


def _kept_in(model: nn.Module) -> frozenset[Any]:
    """Experts of transformers that have biases add them in place, and what is kept must not change."""
    if any(getattr(part, "has_bias", False) for part in model.modules()):
        return frozenset(operation for operation in _KEPT if "_grouped_mm" not in str(operation))
    return frozenset(_KEPT)


def _recomputing(forward: Callable[..., Any], kind: str, kept: frozenset[Any]) -> Callable[..., Any]:
    def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    make: Callable[..., Any] = create_selective_checkpoint_contexts
    options: dict[str, Any] = {"context_fn": partial(make, keep_products)} if kind == "selective" else {}
    return partial(checkpoint, forward, use_reentrant=False, **options)
