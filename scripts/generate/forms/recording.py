"""Recording: what the blocks of a model weigh, keep alive and compute, read from a trace at their real widths.

A symbolic form (`form_trace`) knows the symbols that an architecture is made of; here everything is a number but the
samples and the positions of a batch, so that a model of any architecture can be recorded, and only that model.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from planner.cost.memory.activations.dimensions import Dimensions
from planner.cost.memory.activations.form import Form, Polynomial, add, multiply, scale
from planner.models.facts import BlockWork, ModelFacts
from scripts.generate.forms.form_trace import Variant, record_step, tie
from strategies.parallel.blocks import repeated_blocks
from strategies.torch_compat.dispatch import FakeTensorMode
from strategies.torch_compat.tensors import tree_leaves, tree_map
from strategies.tracing.cuda.as_cuda import as_cuda
from strategies.tracing.cuda.attention import unpadded
from strategies.tracing.denoisers import CLIP_TOKENS, FLUX_TOKENS, T5_TOKENS, Denoiser, denoiser
from strategies.tracing.denoisers import batch_of as denoiser_batch
from strategies.tracing.forms.derive import Derivation
from strategies.tracing.forms.timeline import Storage, Timeline
from strategies.tracing.module_trace import Reading, count_work
from strategies.tracing.step.build import Subject
from strategies.tracing.step.images import follow_images, images_of
from strategies.tracing.step.step import loss_of
from strategies.tracing.to_hf import config_of

# Shapes in which only samples and positions are symbols.


SAMPLES, PIECES = 13, 17
"""Primes that no width of a recorded model has as a factor, but for widths that its weights have too."""
LOOPED_LENGTH = 67
BESIDE = 8
"""A dimension this near to the length is the length and a constant: convolutions pad, shifted labels are one less."""
POINTS: tuple[Dimensions, ...] = tuple(
    {"b": float(samples), "s": float(length)} for samples in (1, 4, 16) for length in (128, 1024, 4096, 32768)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """`length` positions, computed in `pieces`; `constants` are sizes that the weights have."""

    length: int
    pieces: int
    constants: frozenset[int]

    def elements(self, shape: tuple[int, ...]) -> Polynomial:
        """Return the number of elements of a tensor of this shape."""
        total: Polynomial = {"": 1.0}
        for size in shape:
            total = multiply(total, self._dimension(size))
        return total

    def count(self, _elements: Polynomial, number: int, _in_all: int) -> Polynomial:
        """So many like tensors: one for every position where they are about as many as there are positions."""
        times = round(number / self.length)
        near = times > 0 and abs(number - times * self.length) <= BESIDE
        return {"s": float(times), "": float(number - times * self.length)} if near else {"": float(number)}

    def count_of_images(self, elements: Polynomial, number: int, in_all: int) -> Polynomial:
        """So many like tensors: some for each sample where none holds all samples and a step makes as many for each."""
        single = not any("b" in term.split() for term in elements)
        return {"b": number / SAMPLES} if single and in_all % SAMPLES == 0 else {"": float(number)}

    def _dimension(self, size: int) -> Polynomial:
        if size in self.constants or size == 0:
            return {"": float(size)}
        if size % SAMPLES == 0:
            return multiply({"b": 1.0}, self._dimension(size // SAMPLES))
        if size % self.pieces == 0:
            return {"s": size / self.length}
        if self.pieces < self.length and size == self.pieces + 1:  # the states between the pieces, and the first
            return {"s": self.pieces / self.length, "": 1.0}
        if abs(size - self.length) <= BESIDE:
            return {"s": 1.0, "": float(size - self.length)}
        return {"": float(size)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """Square images of SIDE x SIDE patches; `texts` are tokens that some tensors have beside them or alone."""

    texts: frozenset[int]
    constants: frozenset[int]

    def elements(self, shape: tuple[int, ...]) -> Polynomial:
        """Return the number of elements of a tensor of this shape."""
        total: Polynomial = {"": 1.0}
        sides = 0
        for size in shape:
            if size in self.constants or size in self.texts:
                total = multiply(total, {"": float(size)})
                continue
            if size and size % SAMPLES == 0:
                total, size = multiply(total, {"b": 1.0}), size // SAMPLES
            for text in (0, *self.texts):
                if size in (SIDE**2 + text, _padded(SIDE**2 + text)) and (text or size != SIDE**2):
                    total, size = multiply(total, {"s": 1.0, "": float(text)}), 1
            while size and size % SIDE == 0:
                sides, size = sides + 1, size // SIDE
            total = multiply(total, {"": float(size)})
        for _ in range(sides // 2):
            total = multiply(total, {"s": 1.0})
        return multiply(total, {"": float(SIDE if sides % 2 else 1)})


SIDE = 19
"""A prime that no width of a denoiser has as a factor."""
PATCH_POINTS: tuple[Dimensions, ...] = tuple(
    {"b": float(samples), "s": float(side**2)} for samples in (1, 4, 16, 64) for side in (8, 16, 32, 64, 128)
)


def _padded(length: int) -> int:
    """Return a length as the memory-efficient kernel rounds it up for its rows' statistics."""
    return -(-length // 32) * 32


# The model, whole and short.


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One row of `recorded.yaml`, as far as it says how the model is built and run."""

    facts: ModelFacts
    config: Mapping[str, Any]
    short: Mapping[str, Any]
    chunk: int = 1
    loops: bool = False

    @property
    def makes_images(self) -> bool:
        """True if samples are latents of images, which a denoiser is trained on."""
        return self.facts.kind == "diffusion"

    @property
    def sees_images(self) -> bool:
        """True if samples have images beside text."""
        return self.facts.kind == "vision-language"


def meta_module(recipe: Recipe, *, short: bool, eager: bool = False, length: int = SIDE**2) -> nn.Module:
    """Return the module that its library builds, without memory for its weights; `length` is that of images."""
    arguments = {**recipe.config, **(recipe.short if short else {})}
    facts = recipe.facts
    if recipe.makes_images:
        return denoiser(facts.architecture, arguments, length)
    config = config_of({"model_type": facts.model_type, "architecture": facts.architecture, "arguments": arguments})
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part.use_cache = False
    if eager:
        config._attn_implementation = "eager"
    build: Any = getattr(import_module("transformers"), recipe.facts.architecture)
    with torch.device("meta"), import_module("transformers.initialization").no_init_weights():
        module: Any = build(config)
    module.tie_weights()
    training: nn.Module = module.train()
    return training


def kinds_of(module: Any) -> list[str]:
    """Return the kind of each block: its class, numbered where blocks of one class differ.

    They have other weights, or see all of an image instead of a window.
    """
    seen: dict[str, list[object]] = {}
    kinds = []
    whole = getattr(getattr(module.config, "vision_config", None), "fullatt_block_indexes", ())
    for index, block in enumerate(repeated_blocks(module)):  # an image tower comes first
        name = type(block).__name__
        shapes = index in whole, tuple(tuple(weight.shape) for weight in block.parameters())
        variants = seen.setdefault(name, [])
        if shapes not in variants:
            variants.append(shapes)
        variant = variants.index(shapes)
        kinds.append(f"{name}{variant + 1 if variant else ''}")
    return kinds


def batch_of(module: Any, samples: int, length: int) -> dict[str, Any]:
    """Token ids that are their own labels, and an image for each sample where the model sees one; or its latents."""
    if isinstance(module, Denoiser):
        return denoiser_batch(module, samples, length)
    tokens = torch.zeros(samples, length, dtype=torch.long)
    images = images_of(module.config, samples, length) if hasattr(module.config, "vision_config") else {}
    return {"input_ids": tokens, **images, "labels": tokens}


# The memory form.


def recorded_form(recipe: Recipe, variant: Variant) -> Form:
    """Return the form of one model in one precision and with one kind of attention."""
    module = meta_module(recipe, short=True, eager=variant.eager)
    length = LOOPED_LENGTH if recipe.loops else recipe.chunk * PIECES if recipe.chunk > 1 else 1024 + PIECES + 14
    sizes = frozenset(size for weight in module.parameters() for size in weight.shape)
    if recipe.makes_images:
        return _denoisers_form(recipe, variant, module, sizes)
    lengths = Lengths(length=length, pieces=length // recipe.chunk, constants=sizes - {SAMPLES, length})
    if variant.mode == "pure":
        module.to(torch.bfloat16)
    autocast: Any = torch.autocast("cpu", torch.bfloat16) if variant.mode == "autocast" else contextlib.nullcontext()
    blocks = tuple(repeated_blocks(module))
    subject = Subject(facts=recipe.facts, config=None, module=module, blocks=blocks)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        tie(module)
        dtype = next(module.parameters()).dtype
        batch = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in batch_of(module, SAMPLES, length).items()
        }
        with as_cuda(), unpadded(), follow_images(module):
            timeline = record_step(subject, batch, autocast, on_cuda=True)
    counted = lengths.count if recipe.loops else lengths.count_of_images if recipe.sees_images else None
    if counted is None:
        return Derivation(timeline, kinds_of(module), lengths.elements, POINTS).form()
    return LoopDerivation(timeline, kinds_of(module), lengths.elements, POINTS, counted).form()


class LoopDerivation(Derivation):
    """Reads a timeline in which a loop over positions or images makes one storage for each.

    `counted` says, of the elements of a storage, the number alive of its like and the number that the whole step makes,
    what that number depends on.
    """

    def __init__(
        self,
        timeline: Timeline,
        labels: Sequence[str],
        elements: Callable[[tuple[int, ...]], Polynomial],
        points: Sequence[Dimensions],
        counted: Callable[[Polynomial, int, int], Polynomial],
    ) -> None:
        super().__init__(timeline, labels, elements, points)
        self._counted = counted
        self._freed = sorted({storage.freed for storage in timeline.storages if storage.freed is not None})
        self._in_all = Counter(map(_likeness, timeline.storages))

    def _within(self, start: int, end: int) -> list[int]:
        """Return, of the loop's thousands of moments, only those before something is freed."""
        moments = super()._within(start, end)
        return [moment for moment, later in pairwise([*moments, end + 1]) if later > end or self._frees(moment, later)]

    def _frees(self, start: int, end: int) -> bool:
        """Return whether anything is freed after `start` up to `end`."""
        return bisect_right(self._freed, start) < bisect_right(self._freed, end)

    def _numbered(self, counts: Callable[[Storage], bool]) -> Iterator[tuple[Storage, Polynomial]]:
        """Yield one storage for all that are alike, with the elements of all of them."""
        alike: dict[tuple[object, ...], list[tuple[Storage, Polynomial]]] = {}
        for storage, elements in super()._numbered(counts):
            alike.setdefault(_likeness(storage), []).append((storage, elements))
        for kind, ((storage, elements), *others) in alike.items():
            yield storage, multiply(elements, self._counted(elements, 1 + len(others), self._in_all[kind]))


def _likeness(storage: Storage) -> tuple[object, ...]:
    return storage.shape, storage.item_bytes, storage.operation, storage.copies_weight, storage.gradient


def _denoisers_form(recipe: Recipe, variant: Variant, module: nn.Module, sizes: frozenset[int]) -> Form:
    if variant.mode == "pure":
        module.to(torch.bfloat16)
    autocast: Any = torch.autocast("cpu", torch.bfloat16) if variant.mode == "autocast" else contextlib.nullcontext()
    blocks = tuple(repeated_blocks(module))
    subject = Subject(facts=recipe.facts, config=None, module=module, blocks=blocks)
    outputs: list[list[tuple[tuple[int, ...], int]]] = []

    def note(_block: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        outputs.append([(tuple(leaf.shape), leaf.element_size()) for leaf in tensors])

    handles = [block.register_forward_hook(note) for block in blocks]
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        dtype = next(module.parameters()).dtype
        batch = tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
            batch_of(module, SAMPLES, SIDE**2),
        )
        with as_cuda():
            timeline = record_step(subject, batch, autocast, on_cuda=True)
    for handle in handles:
        handle.remove()
    patches = Patches(texts=TEXTS, constants=sizes)
    kinds = kinds_of(module)
    form = Derivation(timeline, kinds, patches.elements, PATCH_POINTS).form()
    given = {kind: outputs[places[min(1, len(places) - 1)]] for kind, places in _places(kinds).items()}
    boundaries = {
        kind: add(scale(patches.elements(shape), width) for shape, width in tensors) for kind, tensors in given.items()
    }
    # A block hands on the text's tokens beside the image's.
    return replace(
        form, blocks={name: replace(block, boundary=boundaries[name]) for name, block in form.blocks.items()}
    )


TEXTS = frozenset({CLIP_TOKENS, CLIP_TOKENS + T5_TOKENS, FLUX_TOKENS})


def _places(kinds: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    return places


# The work of a forward pass.


def recorded_work(recipe: Recipe, repeats: Mapping[str, int]) -> tuple[BlockWork, ...]:
    """Work of each kind of block and, under no name, of what is outside the blocks, by the length of a sample."""
    step = 32 if recipe.loops else 640 if recipe.sees_images else 256
    lengths = (256, 1024, 2304) if recipe.makes_images else (step, 2 * step, 3 * step)  # images are square
    readings = []
    for length in lengths:
        few, many = (_worked(recipe, samples, length) for samples in (2, 4))
        readings.append({kind: _added_by_a_sample(few[kind], many[kind]) for kind in few})
    return tuple(
        BlockWork(
            block=kind,
            repeats=repeats.get(kind, 1),
            **{name: _growth(lengths, [reading[kind][name] for reading in readings]) for name in _COUNTED},
        )
        for kind in readings[0]
    )


_PER_SAMPLE = ("operations", "operands", "moved")
_PER_BATCH = ("products_launched", "kernels_launched")
_COUNTED = (*_PER_SAMPLE, *_PER_BATCH)


def _added_by_a_sample(few: Reading, many: Reading) -> dict[str, float]:
    grows = {name: (getattr(many, name) - getattr(few, name)) / 2 for name in _PER_SAMPLE}
    return grows | {name: float(getattr(many, name)) for name in _PER_BATCH}


def _growth(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Fit the parabola through three lengths: its constant, its factors of s and of s squared."""
    (near, middle, far), (first, second, third) = lengths, values
    rise = (second - first) / (middle - near)
    square = ((third - second) / (far - middle) - rise) / (far - near)
    linear = rise - square * (near + middle)
    return first - linear * near - square * near**2, linear, square


def _worked(recipe: Recipe, samples: int, length: int) -> dict[str, Reading]:
    """Of the second block of each kind, and of all that is in no block."""
    module = meta_module(recipe, short=True, length=length)
    blocks = repeated_blocks(module)
    kinds = kinds_of(module)
    outside = Reading()
    readings = {kind: Reading() for kind in dict.fromkeys(kinds)} | {"": outside}
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        module.to_empty(device="cpu")
        tie(module)
        stack.enter_context(as_cuda())
        stack.enter_context(unpadded())
        stack.enter_context(follow_images(module))
        everything = Reading()
        for block, kind in zip(blocks, kinds, strict=True):
            _watch(block, everything, readings[kind])
        with torch.no_grad(), count_work(everything):
            loss_of(module(**batch_of(module, samples, length)))
    for name in _COUNTED:
        inside = sum(getattr(readings[kind], name) for kind in dict.fromkeys(kinds))
        setattr(outside, name, getattr(everything, name) - inside)
        for kind in dict.fromkeys(kinds):
            setattr(readings[kind], name, getattr(readings[kind], name) / kinds.count(kind))
    return readings


def _watch(block: nn.Module, everything: Reading, own: Reading) -> None:
    before: list[Reading] = []

    def enter(*_arguments: object) -> None:
        before.append(replace(everything))

    def leave(*_arguments: object) -> None:
        earlier = before.pop()
        for name in _COUNTED:
            added_here = getattr(everything, name) - getattr(earlier, name)
            setattr(own, name, getattr(own, name) + added_here)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
