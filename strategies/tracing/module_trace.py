"""Trace the memory of a module's activations by running it on fake tensors, without memory, weights or a GPU.

Fake tensors have shapes and storages and no data (torch's `FakeTensorMode`), so forward, loss and backward take
milliseconds for any size. Two batch sizes give what every sample adds and what is there whatever the batch. Weights and
the gradients that are made of them are left to the closed forms, which know how a strategy holds them.

Where layers or sequences may be split, the first of the ranks that share them is traced too, with no other rank there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from hardware_db.device import Device
from planner.cost.memory.activations.figures import figures_of_form
from planner.models.facts import ModelFacts, TracedActivations, TracedMoment
from planner.models.figures import Figures
from planner.search.estimate import heads_left_over
from planner.search.request import Request
from planner.vocabulary import Precision, Task
from strategies.parallel.blocks import repeated_blocks
from strategies.parallel.expert import is_mixture
from strategies.parallel.model import split_imagined
from strategies.torch_compat.dispatch import FakeTensorMode, TorchDispatchMode, packet_of, schema_of
from strategies.torch_compat.tensors import storage_number, tree_leaves, tree_map
from strategies.tracing.cuda.attention import unpadded
from strategies.tracing.example import arguments_of, examples_for
from strategies.tracing.forms.derive import Derivation
from strategies.tracing.forms.timeline import Marks, Recorder, Timeline
from strategies.tracing.step.refusal import guard
from strategies.tracing.step.step import fake_copy, fake_tensor, loss_of, on_device
from strategies.tracing.storage_tracker import StorageTracker

_log = logging.getLogger(__name__)

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
Degrees: TypeAlias = tuple[int, int, int, bool]
"""Over how many ranks layers are split (tp), tokens (cp), and experts spread (ep); whether tp ranks split sequences."""
WHOLE: Degrees = (1, 1, 1, False)
Shaped: TypeAlias = tuple[tuple[int, ...], int]
"""A shape, and the bytes of an item."""


def work_of(
    facts: ModelFacts, module: nn.Module, batch: Any, length: int | None = None
) -> tuple[Task | None, int | None]:
    """Return task and length of a module's samples: `length` where it is known, else that of its batch's token ids.

    What nothing is known of is None. A module that no catalogue knows and whose batch has no tokens has a task of its
    own, and a sample is one position long; only a matrix of features has as many as it has rows.
    """
    if length is not None or batch is None:
        return None, length
    shown = next(examples_for(module, batch))
    if shown.tokens or facts.kind != "custom":
        return None, shown.tokens or None
    return "custom", shown.positions


def traced_request(request: Request, module: nn.Module, batch: Any, degrees: Degrees = WHOLE) -> Request:
    """Return the request with what a trace of the module found, in its precision and on its device.

    A plan is to have other `degrees` than WHOLE, whatever the request says.
    """
    work = request.workload
    parts = _degrees_of(request) if degrees == WHOLE else (degrees,)
    device, uneven = request.cluster.device, work.expert_imbalance
    facts = traced_facts(request.facts, module, batch, work.precision, device, parts, uneven)
    return replace(request, facts=facts)


def _degrees_of(request: Request) -> tuple[Degrees, ...]:
    """Return the degrees to trace a module with beside the whole: those asked for, or two ranks that split layers."""
    if request.degrees is not None:
        degrees = request.degrees
        wanted = degrees.tp, degrees.cp, degrees.ep, degrees.tp > 1 and bool(degrees.sequence_parallel)
        return (wanted,) if wanted != WHOLE else ()
    can_split = request.cluster.gpus > 1 and "tp" in (request.splits or ())
    return ((2, 1, 1, False),) if can_split and not heads_left_over(request.facts, 2) else ()


def traced_facts(
    facts: ModelFacts,
    module: nn.Module,
    batch: Any,
    precision: Precision,
    device: Device,
    degrees: Sequence[Degrees] = (),
    uneven: float = 1.0,
) -> ModelFacts:
    """Return the facts with what a trace found, for a module that no closed form describes.

    `batch` is one of its own, of any number of samples (`strategies.tracing.example.arguments_of` says in which
    shapes), or None. It is traced as a rank of each of `degrees` too, where it can be split so, to whose experts
    `uneven` times as many tokens come as the mean.

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
            with guard():
                traces = trace_activations(module, example.batch_of, precision, device)
        except Exception as problem:
            problems.append(problem)
            continue
        for each in degrees:
            trace = partial(trace_activations, module, example.batch_of, precision, device, each, uneven=uneven)
            traces = _with_part(traces, each, trace)
        return replace(facts, traced=traces)
    reason = str(problems[0]).strip().splitlines() or [type(problems[0]).__name__]
    return replace(facts, note=f"tracing it on fake tensors failed: {reason[0][:120]}")


def _with_part(
    traces: dict[str, TracedActivations], degrees: Degrees, trace: Callable[[], dict[str, TracedActivations]]
) -> dict[str, TracedActivations]:
    """Add what a rank of these degrees holds; of a module that cannot be split so it is taken to hold the whole."""
    try:
        with guard():
            part = trace()
    except Exception:  # whatever code of the user's own raises with a part of its layers or tokens
        _log.debug("no trace of a rank of tp, cp, ep %s", degrees[:3], exc_info=True)
        return traces
    return {mode: replace(whole, parts={**whole.parts, degrees: part[mode]}) for mode, whole in traces.items()}


def trace_activations(
    module: nn.Module,
    batch_of: Callable[[int], Any],
    precision: Precision,
    device: Device,
    degrees: Degrees = WHOLE,
    *,
    uneven: float = 1.0,
) -> dict[str, TracedActivations]:
    """Activations in every mode that `precision` can mean, on the first of the ranks that share the module.

    `batch_of(n)` is a batch of n samples, as `arguments_of` takes it. The module must return a loss, an object with
    `.loss`, or tensors whose sum is then taken as the loss.

    Raises:
        Exception: whatever the module raises when it is run on fake tensors.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if degrees != WHOLE:
        module = _part_of(module, fake, degrees, uneven)
    with _training(module):
        return {
            mode: _per_sample(*(_run(module, batch_of(samples), mode, device, fake) for samples in BATCHES))
            for mode in MODES[precision]
        }


@contextlib.contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Have a module train inside, as it will when the script has called `train()`; one that is frozen stays so."""
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
    """One run over a whole batch, in bytes, elements and operations; `kinds` are those of the blocks in their order."""

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
    kinds: tuple[str, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)


def _per_sample(few: Reading, many: Reading) -> TracedActivations:
    added = BATCHES[1] - BATCHES[0]
    names = ("kept", "forward", "backward", "block", "boundary", "products", "operations", "operands", "moved")
    slopes = {name: max((getattr(many, name) - getattr(few, name)) / added, 0.0) for name in names}
    # The order in which gradients are made is the same; a module that decides by its batch has another one.
    alike = [elements for _, elements in few.moments] == [elements for _, elements in many.moments]
    moments = _moments(few, many) if alike else ()
    return TracedActivations(
        **slopes,
        products_launched=many.products_launched,
        kernels_launched=many.kernels_launched,
        moments=moments,
        buffers=many.buffers,
        figures=_figures(few, many),
    )


def _figures(few: Reading, many: Reading) -> Figures | None:
    """Return the figures of a module whose blocks run once each, and alike for both batches."""
    joined = _join(few.timeline, many.timeline)
    if joined is None or not few.kinds or len(joined.outputs) != len(few.kinds):
        return None
    try:
        form = Derivation(joined, few.kinds, _grown, _POINTS).form()
    except (KeyError, IndexError):  # a block that has no part in the backward pass
        _log.debug("no figures of blocks %s", few.kinds, exc_info=True)
        return None
    return figures_of_form(form, few.kinds)


_POINTS: tuple[Mapping[str, float], ...] = tuple({"b": float(samples)} for samples in (1, 4, 16, 64, 256))


def _join(few: Timeline, many: Timeline) -> Timeline | None:
    """Join the same step over both batches, each shape the elements of both; None where they are not the same."""
    alike = few.marks == many.marks and len(few.storages) == len(many.storages)
    if not alike or any(a.operation != b.operation for a, b in zip(few.storages, many.storages, strict=True)):
        return None

    def pairs(small: Sequence[Shaped], large: Sequence[Shaped]) -> list[Shaped]:
        return [((prod(a), prod(b)), width) for (a, width), (b, _) in zip(small, large, strict=True)]

    for storage, other in zip(few.storages, many.storages, strict=True):
        storage.shape = prod(storage.shape), prod(other.shape)
    few.inputs, few.outside = pairs(few.inputs, many.inputs), pairs(few.outside, many.outside)
    few.buffers = [pairs(small, large) for small, large in zip(few.buffers, many.buffers, strict=True)]
    return few


def _grown(elements: tuple[int, ...]) -> dict[str, float]:
    """Elements whatever the batch, and by sample, of those of both batches."""
    few, many = elements
    grows = (many - few) / (BATCHES[1] - BATCHES[0])
    return {term: size for term, size in (("", few - BATCHES[0] * grows), ("b", grows)) if size}


def _moments(few: Reading, many: Reading) -> tuple[TracedMoment, ...]:
    """Those that can be the largest for some batch and width of gradients."""
    added, moments = BATCHES[1] - BATCHES[0], list[TracedMoment]()
    for (small, gradients), (large, _) in zip(few.moments, many.moments, strict=True):
        grows = max((large - small) / added, 0.0)
        moments.append(TracedMoment(fixed=max(large - BATCHES[1] * grows, 0.0), per_sample=grows, gradients=gradients))
    kept: list[TracedMoment] = []
    for moment in reversed(moments):  # gradients only become more
        if not any(other.fixed >= moment.fixed and other.per_sample >= moment.per_sample for other in kept):
            kept.append(moment)
    return tuple(reversed(kept))


def _run(module: nn.Module, batch: Any, mode: str, device: Device, fake: FakeTensorMode) -> Reading:
    dtype = torch.bfloat16 if mode == "pure" else None
    weights = {
        name: fake_tensor(fake, value, dtype).requires_grad_(value.requires_grad)
        for name, value in module.named_parameters()
    }
    buffers = {name: fake_tensor(fake, value, dtype) for name, value in module.named_buffers()}
    inputs = tree_map(
        lambda leaf: fake_tensor(fake, leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, arguments_of(batch)
    )
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if mode == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    recorder = Recorder([*weights.values(), *buffers.values(), *given], weights.values(), on_cuda=not device.is_cpu)
    with fake, on_device(device), unpadded(), StorageTracker(buffers.values(), fake=True) as tracker, recorder:
        reading = Reading(buffers=tracker.live_bytes, timeline=recorder.timeline)
        tracker.meet(weights.values())
        resting = tracker.live_bytes
        watch = _BlockWatch(tracker, repeated_blocks(module), reading, recorder)
        with balance_experts(module), watch, count_work(reading), autocast:
            loss = loss_of(torch.func.functional_call(module, {**weights, **buffers}, *inputs))
        recorder.timeline.mark("loss")
        reading.kept, reading.forward = tracker.live_bytes - resting, tracker.peak_bytes - resting
        gradients = _Gradients(tracker, resting, reading, recorder)
        for weight in weights.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(gradients.drop)  # type: ignore[no-untyped-call]
        tracker.restart_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.rest()
        reading.backward = max(size for size, _ in reading.moments)
    for name in ("back_first", "end"):  # a first block that is given no activations has no gradient of them
        recorder.timeline.mark(name)
    inside = {id(buffer) for block in repeated_blocks(module) for buffer in block.buffers()}
    outside = [buffer for buffer in module.buffers() if id(buffer) not in inside]
    recorder.timeline.outside = [(tuple(buffer.shape), buffer.element_size()) for buffer in outside]
    recorder.timeline.inputs = [(tuple(leaf.shape), leaf.element_size()) for leaf in given]
    return reading


def _part_of(module: nn.Module, fake: FakeTensorMode, degrees: Degrees, uneven: float) -> nn.Module:
    """Return a copy of the module on fake tensors, split as `dsplan.initialize` splits it."""
    copied, _ = fake_copy(module, (), fake, None)
    with fake, balance_experts(copied):
        split_imagined(copied, *degrees, uneven=uneven)
    return copied


class _Gradients:
    """The peak before each gradient is ready, with the elements of those that were ready by then.

    A strategy decides what becomes of a gradient; here it is let go of at once.
    """

    def __init__(self, tracker: StorageTracker, resting: int, reading: Reading, recorder: Recorder) -> None:
        self._tracker, self._resting, self._reading, self._recorder = tracker, resting, reading, recorder
        self._elements = 0

    def drop(self, weight: torch.Tensor) -> None:
        self.rest()
        if weight.grad is not None:
            self._recorder.is_gradient(weight.grad)
        self._elements += weight.numel()
        weight.grad = None
        self._tracker.restart_peak()

    def rest(self) -> None:
        self._reading.moments.append((self._tracker.peak_bytes - self._resting, self._elements))


class _BlockWatch(Marks):
    """Reads the tracker around one repeated block: the second where there is one, since the first may differ.

    It also names the moments at which each block begins and ends, as far as it takes and gives activations.
    """

    def __init__(
        self, tracker: StorageTracker, blocks: Sequence[nn.Module], reading: Reading, recorder: Recorder
    ) -> None:
        super().__init__(recorder, blocks)
        self._tracker, self._reading, self._before = tracker, reading, 0
        self._block = blocks[min(1, len(blocks) - 1)] if blocks else None
        linears = self._block.modules() if self._block is not None else ()
        self.handles += [
            part.register_forward_hook(self._leave_linear) for part in linears if isinstance(part, nn.Linear)
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def enter(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if block is self._block:
            self._before = self._tracker.live_bytes
        with _logged():
            super().enter(block, inputs, named)

    def leave(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if block is self._block:
            self._reading.block = self._tracker.live_bytes - self._before
            self._reading.boundary = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        self._reading.kinds = (*self._reading.kinds, _kind(block))
        with _logged():
            super().leave(block, inputs, output)

    def _leave_linear(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self._reading.products += output.nbytes


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log what fails inside: nothing that a block may be given or give stops the module."""
    try:
        yield
    except Exception:
        _log.debug("a block's moments are not known", exc_info=True)


def _kind(block: nn.Module) -> str:
    """Blocks of one class whose weights have the same shapes are alike."""
    shapes = ", ".join("x".join(map(str, weight.shape)) for weight in block.parameters())
    return f"{type(block).__name__} of {shapes}"


# Mixtures: which tokens choose an expert is a value.


@contextlib.contextmanager
def balance_experts(module: nn.Module) -> Iterator[None]:
    """Have routed experts (`strategies.parallel.expert.is_mixture`) that look up their tokens find as many each."""
    make: Any = _Balanced
    handles: list[Any] = []
    for mixture in filter(is_mixture, module.modules()):
        mode = make(mixture)
        handles.append(mixture.register_forward_pre_hook(partial(_enter, mode)))
        handles.append(mixture.register_forward_hook(partial(_leave, mode), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(mode: Any, *_: object) -> None:
    mode.__enter__()


def _leave(mode: Any, *_: object) -> None:
    mode.__exit__(None, None, None)


class _Balanced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mixture: Any) -> None:
        initialize: Any = super().__init__
        initialize()
        self._mixture = mixture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.nonzero.default:
            return func(*args, **(kwargs or {}))
        chosen = args[0]
        return chosen.new_empty((chosen.numel() // self._mixture.num_experts, chosen.dim()), dtype=torch.int64)


# The work of a forward pass: operations of products and convolutions, and bytes that all other kernels move.


def count_work(reading: Reading) -> AbstractContextManager[object]:
    """Count the work of what runs inside."""
    make: Any = _Work
    mode: AbstractContextManager[object] = make(reading)
    return mode


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reading: Reading) -> None:
        initialize: Any = super().__init__
        initialize()
        self._reading = reading

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _makes_nothing(func, args, kwargs, result):
            return result
        reading = self._reading
        touched = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        reading.kernels_launched += 1
        count = flop_registry.get(packet_of(func)) or _COUNTED_HERE.get(func)
        if count is None:
            reading.moved += sum(leaf.nbytes for leaf in touched.values())
        else:
            reading.products_launched += 1
            reading.operations += count(*args, **(kwargs or {}), out_val=result)
            reading.operands += sum(leaf.numel() for leaf in touched.values())
        return result


def _makes_nothing(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether an operation is a view of its input, or a question about it (its device), and no kernel."""
    if schema_of(func).is_mutable:
        return False
    given = {storage_number(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    results = [storage_number(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return set(results) <= given


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
