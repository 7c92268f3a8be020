"""Activation checkpointing: which tensors a module keeps for backward and which it computes again.

The engine runs it and the trace runs it, so that both mean the same by `full` and `selective`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.errors import DsplanError
from strategies.parallel.blocks import repeated_blocks
from strategies.torch_compat.dispatch import FakeTensor
from strategies.torch_compat.tensors import tree_flatten, tree_unflatten, version_of

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_LAST: dict[torch.device, weakref.ref[Parked]] = {}


class Parking(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, tensors that autograd saves are parked until they are asked for."""

    def __init__(self) -> None:
        initialize: Any = super().__init__
        initialize(park, unpark)

    def __exit__(self, *exception: object) -> None:
        leave: Any = super().__exit__
        leave(*exception)
        for device, stream in _STREAMS.items():
            torch.cuda.current_stream(device).wait_stream(stream)


def park(tensor: torch.Tensor) -> Parked | FakeParked:
    """Begin to copy a tensor to the host."""
    if isinstance(tensor, FakeTensor):
        return FakeParked(tensor)
    before = _LAST.get(tensor.device)
    parked = Parked(tensor, before)
    _LAST[tensor.device] = weakref.ref(parked)
    return parked


def unpark(parked: Parked | FakeParked) -> torch.Tensor:
    """Return the tensor to its device."""
    return parked.back()


class FakeParked:
    """A fake tensor's description."""

    def __init__(self, tensor: FakeTensor) -> None:
        self._like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        self._shape, self._stride = tensor.shape, tensor.stride()

    def back(self) -> torch.Tensor:
        """Return the tensor."""
        return torch.empty_strided(self._shape, self._stride, **self._like)


class Parked:
    """One tensor in host memory; `before` is the one that was parked before it on the same device."""

    def __init__(self, tensor: torch.Tensor, before: weakref.ref[Parked] | None) -> None:
        self._device, self._before = tensor.device, before
        self._coming: torch.Tensor | None = None
        self._host = host_room(tensor)
        stream = _stream(tensor.device)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory must not be used again before it is copied

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._coming is not None:
            return
        stream = _stream(self._device)
        if stream is None:
            self._coming = self._host.to(self._device, copy=True)
            return
        with torch.cuda.stream(stream):
            self._coming = self._host.to(self._device, non_blocking=True)

    def back(self) -> torch.Tensor:
        """Return the tensor on its device; the one that backward asks for next begins its way."""
        self.fetch()
        tensor, self._coming = self._coming, None
        assert tensor is not None
        stream = _stream(self._device)
        if stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            tensor.record_stream(current)
            before = self._before() if self._before is not None else None
            if before is not None:
                before.fetch()
        return tensor


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor, pinned where it comes from a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    if device not in _STREAMS:
        kind: Any = torch.cuda.Stream  # without annotations
        _STREAMS[device] = kind(device)
    return _STREAMS[device]


# Results of matrix products and attention: costly to compute again, cheap to keep. The rest is computed again.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
_KEPT = {getattr(torch.ops.aten, name).default for name in _PRODUCTS if hasattr(torch.ops.aten, name)}


def checkpoint_activations(model: nn.Module, kind: str, *, on_host: bool = False, every: int = 1) -> None:
    """Make the model's blocks recompute in backward: `full` everything, `selective` all but matmuls and attention.

    What a block is given, which it starts again from, waits in host memory where `on_host`. A Hugging Face model
    switches on its own checkpointing for `full` of all blocks on the device. Of blocks in a row the first recomputes,
    and each that is `every` further.

    Raises:
        DsplanError: no repeated block was found to checkpoint.
    """
    if kind == "none":
        return
    if kind == "full" and not on_host and every == 1 and getattr(model, "supports_gradient_checkpointing", False):
        hugging_face: Any = model
        renamed = hasattr(hugging_face, "activation_checkpointing_enable")  # in transformers 5
        name = "activation_checkpointing_enable" if renamed else "gradient_checkpointing_enable"
        getattr(hugging_face, name)({"use_reentrant": False})
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise DsplanError(
            f"activation checkpointing {kind!r} found no stack of like blocks (a ModuleList of one class) in"
            f" {type(model).__name__}; choose 'none' or put the blocks in a ModuleList"
        )
    recompute(model, blocks[::every], kind, on_host=on_host)


def recompute(model: nn.Module, chosen: Iterable[nn.Module], kind: str, *, on_host: bool) -> None:
    """Make the chosen modules of a model recompute in backward."""
    kept = _kept_in(model)
    for module in chosen:
        # The forward of the instance, not a module around it: parameters keep their names in checkpoints.
        module.forward = Recomputation(module.forward, kind, kept, on_host=on_host)
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # Keys and values of a cache would be added to it a second time; generation asks for one of its own.
        config.use_cache = False


def recomputed_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that recompute by `recompute`."""
    return [module for module in model.modules() if isinstance(module.__dict__.get("forward"), Recomputation)]


def keeps_products(model: nn.Module) -> bool:
    """Return whether a module of the model recomputes all but its products."""
    recomputations = (module.__dict__["forward"] for module in recomputed_modules(model))
    return any(recomputation.kind == "selective" for recomputation in recomputations)


class Recomputation:
    """A module's forward, which is run again in backward. Copies of the module have a copy of their own of it."""

    def __init__(self, forward: Callable[..., Any], kind: str, kept: frozenset[Any], *, on_host: bool) -> None:
        self.kind, self.recomputed = kind, forward
        self._kept, self._on_host = kept, on_host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, of which backward recomputes what it does not keep."""
        options: dict[str, Any] = {}
        if self.kind == "selective":
            make: Callable[..., Any] = create_selective_checkpoint_contexts
            options["context_fn"] = partial(make, self._keeps_products)
        if not self._on_host:
            return checkpoint(self.recomputed, *args, use_reentrant=False, **options, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        moving = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        inputs = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
        # What has no gradient (masks, positions) is shared by the blocks and stays; the rest must be held by nothing
        # but the checkpoint.
        rest = [None if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]

        def run(*given: Any) -> Any:
            left = iter(given)
            whole = [next(left) if moves else leaf for leaf, moves in zip(rest, moving, strict=True)]
            positional, named = tree_unflatten(whole, structure)
            return self.recomputed(*positional, **named)

        versions = [version_of(tensor) for tensor in inputs]
        with Parking() if torch.is_grad_enabled() else nullcontext():
            result = checkpoint(run, *inputs, use_reentrant=False, **options)
        if versions != [version_of(tensor) for tensor in inputs]:
            raise DsplanError(
                "activation checkpointing on the host copies a module's input while the module runs, and"
                f" {_owner(self.recomputed)} changes it in place; write x = x + y for x += y, or keep it on the device"
            )
        return result

    def _keeps_products(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in self._kept else CheckpointPolicy.PREFER_RECOMPUTE


def _owner(forward: Callable[..., Any]) -> str:
    """Return the class whose forward it is."""
    return type(getattr(forward, "__self__", forward)).__name__


def _kept_in(model: nn.Module) -> frozenset[Any]:
    """Experts of transformers that have biases add them in place, and what is kept must not change."""
    if any(getattr(part, "has_bias", False) for part in model.modules()):
        return frozenset(operation for operation in _KEPT if "_grouped_mm" not in str(operation))
    return frozenset(_KEPT)
