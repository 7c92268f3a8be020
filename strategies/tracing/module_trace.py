"""Trace the memory of a module's activations by running it on fake tensors, without memory, weights or a GPU.

Fake tensors have shapes and storages and no data (torch's `FakeTensorMode`), so forward, loss and backward take
milliseconds for any size. Two batch sizes give what every sample adds and what is there whatever the batch. Weights and
the gradients that are made of them are left to the closed forms, which know how a strategy holds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from hardware_db.device import Device
from planner.models.facts import ModelFacts, TracedActivations, TracedMoment
from planner.search.request import Request
from planner.vocabulary import Precision, Task
from strategies.parallel.blocks import repeated_blocks
from strategies.tracing.cuda.attention import unpadded
from strategies.tracing.example import arguments_of, examples_for
from strategies.tracing.step.refusal import guarded
from strategies.tracing.step.step import loss_of, on_device
from strategies.tracing.storage_tracker import StorageTracker

MODES: Mapping[Precision, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("autocast", "pure"),
    "fp16": ("autocast", "pure"),
    "bf16-pure": ("pure",),
    "fp8": ("autocast", "pure"),
    "fp4": ("autocast", "pure"),
}
"""Which runs a plan of each precision may choose between (docs/explanation/strategies.md, "What a precision means")."""
BATCHES = (2, 4)
"""Batch sizes traced; one sample is special, since dimensions of size one make copies into views."""


def work_of(
    facts: ModelFacts, module: nn.Module, batch: Any, length: int | None = None
) -> tuple[Task | None, int | None]:
    """Task and length of a module's samples: `length` where it is known, else that of the token ids in a batch of its
    own. What nothing is known of is None.

    A module that no catalogue knows and whose batch has no tokens has a task of its own, and a sample is one position
    long; only a matrix of features has as many as it has rows.
    """
    if length is not None or batch is None:
        return None, length
    shown = next(examples_for(module, batch))
    if shown.tokens or facts.kind != "custom":
        return None, shown.tokens or None
    return "custom", shown.positions


def traced_request(request: Request, module: nn.Module, batch: Any) -> Request:
    """The request with what a trace of the module found, in the precision and on the device that it is for."""
    facts = traced_facts(request.facts, module, batch, request.workload.precision, request.cluster.device)
    return replace(request, facts=facts)


def traced_facts(facts: ModelFacts, module: nn.Module, batch: Any, precision: Precision, device: Device) -> ModelFacts:
    """The facts with what a trace found, for a module that no closed form describes; `batch` is one of its own, of any
    number of samples (`strategies.tracing.example.arguments_of` says in which shapes), or None.

    A module may do anything in its forward pass, also what fake tensors cannot follow; the note then says that its
    activations are a rule of thumb, and why.
    """
    if facts.kind != "custom":
        return facts
    if batch is None:
        return replace(facts, note="no batch of its data to trace it with")
    problems: list[Exception] = []
    for example in examples_for(module, batch):
        try:
            with guarded():
                found = trace_activations(module, example.batch_of, precision, device)
            return replace(facts, traced=found)
        except Exception as problem:
            problems.append(problem)
    reason = str(problems[0]).strip().splitlines() or [type(problems[0]).__name__]
    return replace(facts, note=f"tracing it on fake tensors failed: {reason[0][:120]}")


def trace_activations(
    module: nn.Module, batch_of: Callable[[int], Any], precision: Precision, device: Device
) -> dict[str, TracedActivations]:
    """Activations in every mode that `precision` can mean.

    `batch_of(n)` is a batch of n samples, as `arguments_of` takes it. The module must return a loss, an object with
    `.loss`, or tensors whose sum is then taken as the loss.

    Raises:
        Exception: whatever the module raises when it is run on fake tensors.
    """
    with _training(module):
        return {
            mode: _per_sample(*(_run(module, batch_of(samples), mode, device) for samples in BATCHES))
            for mode in MODES[precision]
        }


@contextlib.contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """A module is planned for before the script calls `train()`; one that is frozen on purpose stays so."""
    if module.training:
        yield
        return
    were = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, training in were:
            part.training = training


@dataclass(kw_only=True, slots=True)
class Reading:
    """One run over a whole batch, in bytes, elements and operations."""

    kept: int = 0
    forward: int = 0
    backward: int = 0
    block: int = 0
    boundary: int = 0
    products: int = 0
    moments: list[tuple[int, int]] = field(default_factory=list)
    operations: int = 0
    operands: int = 0
    moved: int = 0
    products_launched: int = 0
    kernels_launched: int = 0
    buffers: int = 0


def _per_sample(few: Reading, many: Reading) -> TracedActivations:
    added = BATCHES[1] - BATCHES[0]
    names = ("kept", "forward", "backward", "block", "boundary", "products", "operations", "operands", "moved")
    slopes = {name: max((getattr(many, name) - getattr(few, name)) / added, 0.0) for name in names}
    # The order in which gradients are made is the same; a module that decides by its batch has another one.
    alike = [made for _, made in few.moments] == [made for _, made in many.moments]
    moments = _moments(few, many) if alike else ()
    return TracedActivations(
        **slopes,
        products_launched=many.products_launched,
        kernels_launched=many.kernels_launched,
        moments=moments,
        buffers=many.buffers,
    )


def _moments(few: Reading, many: Reading) -> tuple[TracedMoment, ...]:
    """Those that can be the largest for some batch and width of gradients."""
    added, found = BATCHES[1] - BATCHES[0], list[TracedMoment]()
    for (small, made), (large, _) in zip(few.moments, many.moments, strict=True):
        grows = max((large - small) / added, 0.0)
        found.append(TracedMoment(fixed=max(large - BATCHES[1] * grows, 0.0), per_sample=grows, gradients=made))
    kept: list[TracedMoment] = []
    for moment in reversed(found):  # gradients only become more
        if not any(other.fixed >= moment.fixed and other.per_sample >= moment.per_sample for other in kept):
            kept.append(moment)
    return tuple(reversed(kept))


def _run(module: nn.Module, batch: Any, mode: str, device: Device) -> Reading:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = torch.bfloat16 if mode == "pure" else None
    weights = {name: _fake_weight(fake, value, dtype) for name, value in module.named_parameters()}
    buffers = {name: _fake(fake, value, dtype) for name, value in module.named_buffers()}
    inputs = tree_map(
        lambda leaf: _fake(fake, leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, arguments_of(batch)
    )
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if mode == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with fake, on_device(device), unpadded(), StorageTracker(buffers.values(), fake=True) as tracker:
        found = Reading(buffers=tracker.live_bytes)
        tracker.meet(weights.values())
        resting = tracker.live_bytes
        with _BlockWatch(tracker, repeated_blocks(module), found), work_counted(found), autocast:
            loss = loss_of(torch.func.functional_call(module, {**weights, **buffers}, *inputs))
        found.kept, found.forward = tracker.live_bytes - resting, tracker.peak_bytes - resting
        gradients = _Gradients(tracker, resting, found)
        for weight in weights.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(gradients.made)  # type: ignore[no-untyped-call]
        tracker.restart_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.rest()
        found.backward = max(size for size, _ in found.moments)
    return found


def _fake(mode: FakeTensorMode, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A stand-in on the CPU, whatever the device of the original."""
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=wanted, device="cpu")


def _fake_weight(mode: FakeTensorMode, value: nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    return _fake(mode, value, dtype).requires_grad_(value.requires_grad)


class _Gradients:
    """The peak before each gradient is ready, with the elements of those that were ready by then.

    A strategy decides what becomes of a gradient; here it is let go of at once.
    """

    def __init__(self, tracker: StorageTracker, resting: int, found: Reading) -> None:
        self._tracker, self._resting, self._found, self._elements = tracker, resting, found, 0

    def made(self, weight: torch.Tensor) -> None:
        self.rest()
        self._elements += weight.numel()
        weight.grad = None
        self._tracker.restart_peak()

    def rest(self) -> None:
        self._found.moments.append((self._tracker.peak_bytes - self._resting, self._elements))


class _BlockWatch:
    """Reads the tracker around one repeated block: the second where there is one, since the first may differ."""

    def __init__(self, tracker: StorageTracker, blocks: Sequence[nn.Module], found: Reading) -> None:
        self._tracker, self._found = tracker, found
        self._block = blocks[min(1, len(blocks) - 1)] if blocks else None
        self._before = 0
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

    def _enter_block(self, _module: nn.Module, _inputs: Any) -> None:
        self._before = self._tracker.live_bytes

    def _leave_block(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._found.block = self._tracker.live_bytes - self._before
        self._found.boundary = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

    def _leave_linear(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self._found.products += output.nbytes


# The work of a forward pass: operations of products and convolutions, and bytes that all other kernels move.


def work_counted(found: Reading) -> AbstractContextManager[object]:
    make: Any = _Work
    made: AbstractContextManager[object] = make(found)
    return made


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Reading) -> None:
        initialize: Any = super().__init__
        initialize()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _makes_nothing(func, args, kwargs, result):
            return result
        found = self._found
        touched = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        found.kernels_launched += 1
        count = flop_registry.get(func._overloadpacket) or _COUNTED_HERE.get(func)
        if count is None:
            found.moved += sum(leaf.nbytes for leaf in touched.values())
        else:
            found.products_launched += 1
            found.operations += count(*args, **(kwargs or {}), out_val=result)
            found.operands += sum(leaf.numel() for leaf in touched.values())
        return result


def _makes_nothing(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an operation is a view of what it was given, or a question about it (its device), and no kernel."""
    if func._schema.is_mutable:
        return False
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    made = [leaf.untyped_storage()._cdata for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return set(made) <= given


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_others: Any, **_named: Any) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, *_others: Any, out_val: torch.Tensor, **_named: Any) -> int:
    """Each row of the left meets one matrix of the right."""
    return 2 * out_val.numel() * left.shape[-1]


# What torch's counter does not know.
_COUNTED_HERE: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    **({torch.ops.aten._grouped_mm.default: _grouped_flops} if hasattr(torch.ops.aten, "_grouped_mm") else {}),
}
