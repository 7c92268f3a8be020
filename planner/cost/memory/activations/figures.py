"""Figures: a memory form with its symbols replaced by a job's sizes; only the samples of a micro-batch stay open."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import le

from planner.cost.memory.activations.dimensions import Dimensions, block_kinds, model_dimensions, shared_width
from planner.cost.memory.activations.form import BlockForm, Form, Moment, find_form, per_sample, structure_of
from planner.cost.memory.ledger import NOTHING, Amount, plus
from planner.cost.precision import Recipe, ScaledProducts
from planner.models.facts import ModelFacts, TracedActivations
from planner.types.job import Job


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment: bytes of activations, bytes of cast weights, elements of new gradients."""

    activations: Amount
    cast: float
    gradients: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFigures:
    """One kind of block, `count` of them in a row; see `planner.cost.memory.activations.form.BlockForm`."""

    name: str
    count: int
    kept: Amount
    cast: float
    boundary: Amount
    products: Amount
    forward: Sequence[Peak]
    backward: Sequence[Peak]
    recomputed: Sequence[Peak]
    replayed: Sequence[Peak]
    buffers: float = 0.0
    unused: Amount = NOTHING
    input: Amount = NOTHING
    once: Amount = NOTHING
    handed: Amount = NOTHING
    again: Amount = NOTHING
    waiting: Amount = NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A whole model; see `planner.cost.memory.activations.form.Form`. `differences`: how far the form's structure is
    from the model's; None if no form was found. `moments` are those of a backward pass that was traced as a whole,
    with the gradients that are finished by then.
    """

    blocks: Sequence[BlockFigures]
    buffers: float
    before: Peak
    loss: Sequence[Peak]
    loss_backward: Sequence[Peak]
    table_backward: Sequence[Peak]
    differences: int | None = 0
    moments: Sequence[Peak] = ()


@dataclass(frozen=True, slots=True)
class _Question:
    """What figures depend on besides the model."""

    mode: str
    attention: str
    on_cpu: bool
    tp: int
    length: int
    source: int


def figures_of(job: Job, recipe: Recipe) -> Figures:
    """The figures of a job's model on one device, with heads and widths divided by its tensor-parallel degree."""
    facts = job.facts
    if facts.kind == "custom":
        traced = facts.traced.get(precision_mode(recipe))
        return _traced(job, recipe, traced) if traced is not None else _untraced(job, recipe)
    configuration = job.configuration
    figures = _catalogued(
        facts,
        _Question(
            precision_mode(recipe),
            "eager" if job.eager_attention else configuration.attention,
            job.cluster.device.is_cpu,
            configuration.tp,
            configuration.sequence_length,
            job.source_length,
        ),
    )
    return figures if recipe.scaled is None else _with_scaled_inputs(figures, job, recipe.scaled)


def _with_scaled_inputs(figures: Figures, job: Job, scaled: ScaledProducts) -> Figures:
    """The figures where linear layers keep their inputs in 8 or 4 bits: a norm's output and what goes into the down
    projection in place of the 16-bit tensor; attention's own output beside it, which its backward needs as it is.

    Of blocks with experts the tokens that are dispatched go in; without a hidden width nothing is known.
    """
    facts, tp = job.facts, job.configuration.tp
    if scaled.saved is None or not facts.hidden_size or not figures.blocks:
        return figures
    hidden, width = float(facts.hidden_size), facts.intermediate_size / tp
    routed = hidden
    if facts.is_moe:
        width = (facts.experts_per_token * facts.moe_intermediate_size + shared_width(facts)) / tp
        routed *= facts.experts_per_token
    copies = (3, 2 if facts.gated_mlp else 1) if scaled.saved_apart else (1, 1)
    less = hidden * (2 - copies[0] * scaled.saved) + routed * (2 - copies[1] * scaled.saved)
    less += width * (2 - scaled.saved) - scaled.saved * facts.num_heads * facts.head_dim / tp
    each = (0.0, -scaled.blocks * less * job.configuration.sequence_length)
    blocks = [
        replace(
            block,
            kept=plus(block.kept, each),
            backward=_moved(block.backward, each),
            recomputed=_moved(block.recomputed, each),
            replayed=_moved(block.replayed, each),
        )
        for block in figures.blocks
    ]
    return replace(figures, blocks=blocks)


def _moved(peaks: Sequence[Peak], amount: Amount) -> Sequence[Peak]:
    """Moments with `amount` more of activations."""
    return [Peak(plus(peak.activations, amount), peak.cast, peak.gradients) for peak in peaks]


def buffer_bytes(job: Job, recipe: Recipe) -> float:
    """Buffers, such as the masks of older models: no strategy splits them."""
    figures = figures_of(job, recipe)
    blocks = figures.blocks
    return figures.buffers + sum(-(-block.count // job.configuration.pp) * block.buffers for block in blocks)


def precision_mode(recipe: Recipe) -> str:
    """The name a trace goes by: what a precision means for activations."""
    if recipe.autocast:
        return "autocast"
    return "fp32" if recipe.compute == 4 else "pure"


@functools.lru_cache(maxsize=256)
def _catalogued(facts: ModelFacts, question: _Question) -> Figures:
    windows = question.attention == "sdpa" and 0 < facts.sliding_window < question.length
    attentions = _attentions(question.attention, windows=windows)
    devices = ("cpu", "cuda") if question.on_cpu else ("cuda",)
    variants = [f"{device} {question.mode} {attention}" for attention, device in product(attentions, devices)]
    found = find_form(structure_of(facts), variants)
    if found is None:
        raise LookupError(f"no memory form for {facts.model_type}")
    sizes = model_dimensions(facts, question.tp) | _lengths(facts, question)
    blocks = [_block(name, count, form, sizes) for name, count, form in _stacks(facts, found.form)]
    figures = _figures(found.form, blocks, sizes, found.differences)
    return _classifying(figures, found.form, sizes | {"V": facts.num_labels}) if _classifies(facts) else figures


def _stacks(facts: ModelFacts, form: Form) -> Iterator[tuple[str, int, BlockForm]]:
    """The model's kinds of blocks with their forms; a kind that the form of another structure lacks takes its last."""
    for name, count in block_kinds(facts, windows="local" in form.blocks):
        yield name, count, form.blocks.get(name) or list(form.blocks.values())[-1]


def _attentions(attention: str, *, windows: bool) -> tuple[str, ...]:
    """The forms that will do, the best first: a model without fused attention has only one."""
    if attention == "eager":
        return ("eager",)
    return ("windows", "sdpa", "eager") if windows else ("sdpa", "eager")


def _lengths(facts: ModelFacts, question: _Question) -> dict[str, float]:
    length, source = question.length, question.source
    if facts.vision is not None:
        source = facts.vision.image_tokens
        if facts.text is not None:
            length = min(length, facts.text.max_position_embeddings or length)
    return {"s": length, "t": source}


def _figures(form: Form, blocks: list[BlockFigures], sizes: Dimensions, differences: int) -> Figures:
    return Figures(
        blocks=blocks,
        buffers=sum(per_sample(form.buffers, sizes)),
        before=_peak(form.before, sizes),
        loss=_peaks(form.loss, sizes),
        loss_backward=_peaks(form.loss_backward, sizes),
        table_backward=_peaks(form.table_backward, sizes),
        differences=differences,
    )


def _classifies(facts: ModelFacts) -> bool:
    """Whether the head is a classifier of text, whose form is that of the language model with labels for words."""
    return bool(facts.vocab_size) and facts.architecture.endswith("ForSequenceClassification")


def _classifying(figures: Figures, form: Form, sizes: Dimensions) -> Figures:
    return replace(
        figures,
        loss=_peaks(form.loss, sizes),
        loss_backward=_peaks(form.loss_backward, sizes),
    )


def _block(name: str, count: int, form: BlockForm, sizes: Dimensions) -> BlockFigures:
    return BlockFigures(
        name=name,
        count=count,
        kept=per_sample(form.kept, sizes),
        cast=sum(per_sample(form.cast, sizes)),
        buffers=sum(per_sample(form.buffers, sizes)),
        boundary=per_sample(form.boundary, sizes),
        products=per_sample(form.products, sizes),
        unused=per_sample(form.unused, sizes),
        input=per_sample(form.input, sizes),
        once=per_sample(form.once, sizes),
        handed=per_sample(form.handed, sizes),
        again=per_sample(form.again, sizes),
        waiting=per_sample(form.waiting, sizes),
        forward=_peaks(form.forward, sizes),
        backward=_peaks(form.backward, sizes),
        recomputed=_peaks(form.recomputed, sizes),
        replayed=_peaks(form.replayed, sizes),
    )


def _peaks(moments: Sequence[Moment], sizes: Dimensions) -> list[Peak]:
    """The moments that can be the largest of their part for this model."""
    found = [_peak(moment, sizes) for moment in moments]
    corners = [_corners(peak) for peak in found]
    kept: list[int] = []
    for index, mine in sorted(enumerate(corners), key=lambda entry: -entry[1][0]):
        if not any(all(map(le, mine, corners[other])) for other in kept):
            kept.append(index)
    return [found[index] for index in sorted(kept)]


def _corners(peak: Peak) -> list[float]:
    """The moment's bytes where they are extreme: few samples and many, cast weights counted or not, gradients freed
    at once or held at eight bytes per element. What a strategy makes of a moment lies between."""
    fixed, grows = peak.activations
    extremes = itertools.product(_FEW_AND_MANY, (peak.cast, 0.0), (_WIDEST * peak.gradients, 0.0))
    return [fixed + samples * grows + cast + gradients for samples, cast, gradients in extremes]


_FEW_AND_MANY = (1, 1024)
_WIDEST = 8.0


def _peak(moment: Moment, sizes: Mapping[str, float]) -> Peak:
    return Peak(
        per_sample(moment.activations, sizes),
        sum(per_sample(moment.cast, sizes)),
        sum(per_sample(moment.gradients, sizes)),
    )


def _traced(job: Job, recipe: Recipe, traced: TracedActivations) -> Figures:
    """A module that was traced with its own batches.

    Where whole replicas keep all that forward made, the moments of the traced backward pass are the step's own. Other
    plans go by its blocks, all of whose bytes are per sample.
    """
    configuration = job.configuration
    keeps_all = configuration.strategy in ("single", "ddp") and configuration.activation_checkpointing == "none"
    if keeps_all and traced.moments:
        return _replayed(traced)
    count = sum(block.repeats for block in job.counts.blocks)
    trained = job.counts.trained
    cast = _cast_bytes(recipe, float(job.counts.largest_block))
    run = [Peak((0.0, traced.block), cast, 0.0)]
    block = BlockFigures(
        name="block",
        count=count,
        kept=(0.0, traced.block),
        cast=cast,
        boundary=(0.0, traced.boundary),
        products=(0.0, min(traced.products, traced.block)),
        recomputed=run,
        replayed=run,
        forward=run,
        backward=[Peak((0.0, traced.block + traced.backward - traced.kept), cast, float(trained.largest_block))],
    )
    return Figures(
        blocks=[block] if count else [],
        buffers=traced.buffers,
        before=Peak((0.0, traced.kept - count * traced.block), 0.0, 0.0),
        loss=[Peak((0.0, traced.forward - traced.kept), 0.0, 0.0)],
        loss_backward=[Peak((0.0, traced.backward - traced.kept), 0.0, 0.0)],
        table_backward=[Peak(NOTHING, 0.0, float(trained.outside_blocks))],
    )


def _replayed(traced: TracedActivations) -> Figures:
    """The traced passes as they were."""
    return Figures(
        blocks=[],
        buffers=traced.buffers,
        before=Peak((0.0, traced.forward), 0.0, 0.0),
        loss=[Peak(NOTHING, 0.0, 0.0)],
        loss_backward=[],
        table_backward=[],
        moments=[Peak((moment.fixed, moment.per_sample), 0.0, moment.gradients) for moment in traced.moments],
    )


def _untraced(job: Job, recipe: Recipe) -> Figures:
    """A module of which only the parameters are known.

    The blocks are taken as a transformer's of the same parameters: a block of P parameters of width h has P/h elements
    of matrix width per token, each kept once by the linear that reads it and once by what follows it.
    """
    hidden, length = max(job.facts.hidden_size, 1), job.configuration.sequence_length
    count = sum(block.repeats for block in job.counts.blocks)
    parameters = job.counts.in_blocks / count if count else 0.0
    cast = _cast_bytes(recipe, parameters)
    kept = 2.0 * recipe.compute * length * parameters / hidden
    run = [Peak((0.0, kept), cast, 0.0)]
    block = BlockFigures(
        name="block",
        count=count,
        kept=(0.0, kept),
        cast=cast,
        boundary=(0.0, float(length * hidden * recipe.residual)),
        products=(0.0, kept / 2),
        recomputed=run,
        replayed=run,
        forward=run,
        backward=[Peak((0.0, 2 * kept), cast, parameters)],
    )
    logits = (0.0, 12.0 * length * job.facts.vocab_size)
    return Figures(
        blocks=[block] if count else [],
        buffers=0.0,
        before=Peak(NOTHING, 0.0, 0.0),
        loss=[Peak(logits, 0.0, 0.0)],
        loss_backward=[Peak(logits, 0.0, float(job.counts.head if job.counts.trains_all else 0))],
        table_backward=[Peak(NOTHING, 0.0, float(job.counts.embedding + job.counts.other))],
        differences=None,
    )


def _cast_bytes(recipe: Recipe, parameters: float) -> float:
    """Autocast's 16-bit copies of a block's weights; no other precision copies them."""
    return 2.0 * parameters if recipe.autocast else 0.0
