"""Trace the memory of a module's activations by running it on fake tensors, without memory, weights or a GPU.

Fake tensors have shapes and storages and no data (torch's `FakeTensorMode`), so forward, loss and backward take
milliseconds for any size. Two batch sizes give the bytes per sample; what does not grow with the batch is left to the
closed forms, which count parameters, gradients and cast copies of weights themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from planner.models.facts import TracedActivations
from strategies.tracing.storage_tracker import StorageTracker

MODES = {"fp32": ("fp32",), "bf16": ("autocast", "pure"), "fp16": ("autocast", "pure"), "bf16-pure": ("pure",)}
"""Which runs a plan of each precision may choose between (docs/explanation/strategies.md, "What a precision means")."""
BATCHES = (2, 4)
"""Batch sizes traced; one sample is special, since dimensions of size one make copies into views."""


def trace_activations(
    module: nn.Module, batch_of: Callable[[int], Any], blocks: Sequence[nn.Module], precision: str
) -> dict[str, TracedActivations]:
    """Activations per sample in every mode that `precision` can mean.

    `batch_of(n)` is a batch of n samples: a mapping of keyword arguments, a sequence of arguments, or one tensor. The
    module must return a loss, an object with `.loss`, or tensors whose sum is then taken as the loss. `blocks` are its
    repeated blocks.

    Raises:
        Exception: whatever the module raises when it is run on fake tensors.
    """
    traced = {}
    for mode in MODES[precision]:
        few, many = (_run(module, batch_of(samples), blocks, mode) for samples in BATCHES)
        added = BATCHES[1] - BATCHES[0]
        names = [item.name for item in fields(TracedActivations)]
        slopes = {name: (getattr(many, name) - getattr(few, name)) / added for name in names}
        traced[mode] = TracedActivations(**{name: max(slope, 0.0) for name, slope in slopes.items()})
    return traced


def _run(module: nn.Module, batch: Any, blocks: Sequence[nn.Module], mode: str) -> TracedActivations:
    """The readings of the whole batch, not yet per sample."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = torch.bfloat16 if mode == "pure" else None
    weights = {name: _fake_weight(fake, value, dtype) for name, value in module.named_parameters()}
    buffers = {name: _fake(fake, value, dtype) for name, value in module.named_buffers()}
    inputs = tree_map(lambda leaf: _fake(fake, leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, batch)
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if mode == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with fake, StorageTracker([*weights.values(), *buffers.values()], fake=True) as tracker:
        at_rest = tracker.live_bytes
        watch = _BlockWatch(tracker, blocks)
        with watch, autocast:
            loss = _loss(torch.func.functional_call(module, {**weights, **buffers}, *_arguments(inputs)))
        kept, forward = tracker.live_bytes - at_rest, tracker.peak_bytes - at_rest
        for weight in weights.values():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        tracker.restart_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = tracker.peak_bytes - at_rest
    return TracedActivations(kept=kept, forward=forward, backward=backward, **watch.readings())


def _fake(mode: FakeTensorMode, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A stand-in on the CPU, whatever the device of the original."""
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=wanted)


def _fake_weight(mode: FakeTensorMode, value: nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    return _fake(mode, value, dtype).requires_grad_(value.requires_grad)


def _drop_gradient(weight: torch.Tensor) -> None:
    # Gradients are counted by strategy; here they would hide what backward needs beside them.
    weight.grad = None


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else output.float().sum()
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


class _BlockWatch:
    """Reads the tracker around one repeated block: the second where there is one, since the first may differ."""

    def __init__(self, tracker: StorageTracker, blocks: Sequence[nn.Module]) -> None:
        self._tracker = tracker
        self._block = blocks[min(1, len(blocks) - 1)] if blocks else None
        self._before = 0
        self._kept = self._boundary = self._products = 0.0
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        if self._block is None:
            return
        self._hooks = [
            self._block.register_forward_pre_hook(self._enter_block),
            self._block.register_forward_hook(self._leave_block),
        ]
        self._hooks += [
            part.register_forward_hook(self._leave_linear)
            for part in self._block.modules()
            if isinstance(part, nn.Linear)
        ]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def readings(self) -> dict[str, float]:
        return {"block": self._kept, "boundary": self._boundary, "products": self._products}

    def _enter_block(self, _module: nn.Module, _inputs: Any) -> None:
        self._before = self._tracker.live_bytes

    def _leave_block(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._kept = float(self._tracker.live_bytes - self._before)
        self._boundary = float(sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)))

    def _leave_linear(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self._products += output.nbytes
