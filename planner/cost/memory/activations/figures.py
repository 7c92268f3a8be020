"""Figures: a memory form with its symbols replaced by a job's sizes; only the samples of a micro-batch stay open."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import le
from typing import Any

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.cost.memo import memo_by_fields
from planner.cost.memory.activations.adapters import (
    AdapterTraits,
    Addition,
    Run,
    Training,
    addition_of,
    runs_of,
    training_of,
)
from planner.cost.memory.activations.dimensions import Dimensions, block_kinds, model_dimensions, shared_width
from planner.cost.memory.activations.form import (
    WHOLE,
    BlockForm,
    Form,
    Moment,
    Polynomial,
    Spread,
    find_form,
    per_rank,
    per_sample,
    structure_of,
    with_heads_apart,
)
from planner.cost.memory.activations.tiled_loss import Head, Tiles, tiles_of, with_tiled_loss
from planner.cost.memory.ledger import NOTHING, Amount, plus
from planner.cost.precision import Recipe, ScaledProducts, keeps_adapters_wide
from planner.cost.split import (
    AttentionExchange,
    attention_exchange,
    attention_widths,
    exchange_elements,
    keeps_sequence_shards,
    kinds_on_stage,
    logit_parts,
)
from planner.models.facts import ModelFacts, TracedActivations
from planner.models.figures import BlockFigures, Figures, Peak
from planner.types.job import Job
from planner.vocabulary import DEFAULT_RECOMPUTED, Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """All that figures depend on besides the model."""

    mode: str
    """Precision of the trace, as `precision_mode` has it."""
    attention: str
    on_cpu: bool
    tp: int
    """Ranks that split layers."""
    length: int
    """Tokens of a sample."""
    source: int
    """Tokens of a sample in the encoder."""
    cp: int
    """Ranks that split sequences."""
    ep: int
    """Ranks that experts are spread over."""
    is_sequence_parallel: bool
    exchange: AttentionExchange
    """How cp ranks exchange keys and values."""
    keeps_shards: bool
    """Column-parallel products keep their rank's part of the input."""
    code: str
    """Name of the code base."""
    compiled: bool
    loss: Loss
    logit_parts: int
    """Ranks among which a token's logits are split."""
    imbalance: float
    """Tokens of the busiest rank's experts over the mean."""
    recomputed: tuple[str, ...] = ()
    """Modules that selective recomputation drops; none where the code base has a way of its own."""
    fuses_heads: bool = False
    """One weight makes queries, keys and values."""
    training: Training | None = None
    """The trained parts where something is frozen."""
    adapter_traits: AdapterTraits | None = None
    """The job's where something is frozen."""
    tiles: Tiles | None = None
    """Those that log-probabilities are taken in."""


def figures_of(job: Job, recipe: Recipe) -> Figures:
    """Return the figures of a job's model on one device, its heads and widths divided by the tensor-parallel degree."""
    return _figures_of(job, recipe, tiles_of(job))


@memo_by_fields(
    *("strategy", "backend", "precision", "sequence_length", "attention", "recompute_modules"),
    *("tp", "pp", "cp", "ep", "sequence_parallel"),
)
def _figures_of(job: Job, recipe: Recipe, tiles: Tiles | None) -> Figures:
    facts = job.facts
    if facts.kind == "custom":
        traced, chosen = facts.traced.get(precision_mode(recipe)), job.configuration
        splits_sequences = chosen.sequence_parallel and chosen.tp > 1
        traced = traced and traced.of(tp=chosen.tp, cp=chosen.cp, ep=chosen.ep, splits_sequences=splits_sequences)
        return _traced_figures(job, recipe, traced) if traced is not None else _untraced_figures(job, recipe)
    configuration = job.configuration
    question = _Question(
        mode=precision_mode(recipe),
        attention="eager" if job.eager_attention else "flash" if configuration.attention == "flash" else "sdpa",
        on_cpu=job.cluster.device.is_cpu,
        tp=configuration.tp,
        length=configuration.sequence_length,
        source=job.source_length,
        cp=configuration.cp,
        ep=configuration.ep,
        is_sequence_parallel=configuration.sequence_parallel and configuration.tp > 1,
        exchange=attention_exchange(job) if configuration.cp > 1 else "ring",
        keeps_shards=configuration.tp > 1 and keeps_sequence_shards(job),
        code=job.workload.code,
        compiled=job.workload.compile,
        loss=job.workload.loss,
        logit_parts=logit_parts(job),
        imbalance=job.workload.expert_imbalance,
        recomputed=configuration.recomputed,
        fuses_heads=configuration.tp > 1 and _fuses_heads(job),
        tiles=tiles,
    )
    if job.workload.freezes and not job.counts.trains_all:
        adapter_traits = _adapter_traits(job, recipe)
        question = replace(question, training=training_of(job.counts), adapter_traits=adapter_traits)
    figures = _catalogued_figures(facts, question)
    return figures if recipe.scaled is None else _with_scaled_inputs(figures, job, recipe.scaled)


def _fuses_heads(job: Job) -> bool:
    """Return whether a traced form has one weight of three times the hidden width for queries, keys and values.

    GPT-2's is one; forms that are written tell them from hidden states. A feed-forward width of three times the hidden
    one makes a weight of the same shape, and is none.
    """
    facts, code = job.facts, code_base(job.workload.code)
    is_traced = code.traits(compiled=job.workload.compile).block is None
    widths = {facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim}
    return is_traced and facts.fused_qkv and len(widths) == 1


def _adapter_traits(job: Job, recipe: Recipe) -> AdapterTraits:
    code = code_base(job.workload.code)
    block = code.traits(compiled=job.workload.compile).block
    return AdapterTraits(
        mode=_frozen_mode(recipe),
        tp=job.configuration.tp,
        eager=job.eager_attention,
        quantised=recipe.dequantises,
        kept_inputs=code.quantised_inputs,
        drops=code.drops_adapter_inputs,
        one_product=block is not None and block.qkv == "fused",
        widened=keeps_adapters_wide(job.configuration, job.workload),
    )


def _with_scaled_inputs(figures: Figures, job: Job, scaled: ScaledProducts) -> Figures:
    """Return the figures where linear layers keep their inputs in 8 or 4 bits.

    A norm's output and what goes into the down projection are kept so in place of the 16-bit tensor; attention's own
    output beside it, which its backward needs as it is.

    Of blocks with experts the tokens that are dispatched go in; without a hidden width nothing is known.
    """
    if scaled.saved is None or not job.facts.hidden_size or not figures.blocks:
        return figures
    each, replayed = (_narrowed_inputs(job, scaled, modules) for modules in ((), job.configuration.recomputed))
    block_traits = code_base(job.workload.code).traits(compiled=job.workload.compile).block
    drops_modules = block_traits is not None and block_traits.selective == "attention"
    blocks = [
        replace(
            block,
            kept=plus(block.kept, each),
            products=plus(block.products, replayed) if drops_modules else block.products,
            backward=_add_activations(block.backward, each),
            recomputed=_add_activations(block.recomputed, each),
            replayed=_add_activations(block.replayed, each),
        )
        for block in figures.blocks
    ]
    return replace(figures, blocks=blocks)


def _narrowed_inputs(job: Job, scaled: ScaledProducts, recomputed: Sequence[str]) -> Amount:
    """Return what a block's inputs in 8 or 4 bits take more than in 16; what is recomputed is not there at all.

    A module whose output is dropped keeps no input of the product behind it (Transformer Engine's
    `set_save_original_input`).
    """
    facts, chosen = job.facts, job.configuration
    saved, tp = scaled.saved or 0.0, chosen.tp
    parts = tp if chosen.sequence_parallel and keeps_sequence_shards(job) else 1
    hidden, routed = facts.hidden_size / parts, facts.hidden_size / parts
    width, shared = facts.intermediate_size / tp, 0.0
    if facts.is_moe:
        width, shared = facts.experts_per_token * facts.moe_intermediate_size / tp, shared_width(facts) / tp
        routed *= facts.experts_per_token
    if "moe" in recomputed or (not facts.is_moe and "mlp" in recomputed):
        routed, width, shared = 0.0, 0.0, 0.0
    if "moe_act" in recomputed and facts.is_moe:
        width = 0.0
    if "shared_experts" in recomputed:
        shared = 0.0
    if "layernorm" in recomputed and facts.mla is not None:
        hidden = 0.0
    copies = (3, 2 if facts.gated_mlp else 1) if scaled.saved_apart else (1, 1)
    less = hidden * (2 - copies[0] * saved) + routed * (2 - copies[1] * saved)
    less += (width + shared) * (2 - saved) - saved * facts.num_heads * facts.head_dim / tp
    return 0.0, -scaled.blocks * less * chosen.sequence_length / chosen.cp


def _add_activations(peaks: Sequence[Peak], amount: Amount) -> Sequence[Peak]:
    """Moments with `amount` more of activations."""
    return [
        Peak(activations=plus(peak.activations, amount), cast=peak.cast, gradients=peak.gradients) for peak in peaks
    ]


def buffer_bytes(job: Job, recipe: Recipe) -> float:
    """Buffers, such as the masks of older models: no strategy splits them.

    A denoiser's table of positions is as wide as the weights, where FSDP computes in a narrower type.
    """
    if job.facts.kind == "diffusion":
        recipe = replace(recipe, compute=max(recipe.compute, recipe.weight))
    figures = figures_of(job, recipe)
    counts = blocks_on_stage(job, figures)
    return figures.buffers + sum(count * block.buffers for count, block in zip(counts, figures.blocks, strict=True))


def blocks_on_stage(job: Job, figures: Figures) -> tuple[int, ...]:
    """Return how many blocks of each kind a rank of the job's pipeline stage has."""
    chosen, kinds = job.configuration, tuple((block.name, block.count) for block in figures.blocks)
    pieces = chosen.virtual_stages
    return kinds_on_stage(kinds, pp=chosen.pp, virtual_stages=pieces, stage=job.stage, named=chosen.stage_layers)


def precision_mode(recipe: Recipe) -> str:
    """Return the name a trace goes by: what a precision means for activations."""
    if recipe.autocast:
        return "autocast"
    return "fp32" if recipe.compute == 4 else "pure"


def _frozen_mode(recipe: Recipe) -> str:
    """Return the mode of frozen weights: `mixed` is autocast over 16-bit ones."""
    mode = precision_mode(recipe)
    return "mixed" if mode == "autocast" and recipe.frozen_width < 4 else mode


@functools.lru_cache(maxsize=256)
def _catalogued_figures(facts: ModelFacts, question: _Question) -> Figures:
    figures = _of_form(facts, question, *_form_of(facts, question))
    if question.training is None or question.adapter_traits is None:
        return _with_exchanges(figures, _exchanges(facts, question))
    mode = question.adapter_traits.mode
    fixed = _of_form(facts, question, *_form_of(facts, question, frozen=mode), frozen=mode)
    parts = _partly_trained_figures(
        facts,
        training=question.training,
        adapter_traits=question.adapter_traits,
        whole=figures,
        frozen=fixed,
        lengths=_lengths(facts, question),
    )
    return _with_exchanges(parts, _exchanges(facts, question))


def _of_form(facts: ModelFacts, question: _Question, form: Form, differences: int, frozen: str = "") -> Figures:
    sizes = _sizes(facts, question)
    if question.fuses_heads:
        form = with_heads_apart(form, 4 if question.mode == "fp32" else 2)
    blocks = [_block(name, count, block, sizes) for name, count, block in _stacks(facts, form)]
    figures = _figures(form, blocks, sizes, differences)
    if question.tiles is not None and facts.vocab_size:
        figures = _scored_in_tiles(figures, facts, question, form, sizes, frozen)
    if not _classifies(facts):
        return figures
    labels = replace(sizes, tokens=dict(sizes.tokens) | {"V": facts.num_labels})
    return _classifying(figures, form, replace(labels, weights=labels.tokens))


def _scored_in_tiles(
    figures: Figures, facts: ModelFacts, question: _Question, form: Form, sizes: _Sizes, frozen: str
) -> Figures:
    """Return the figures of a form with TRL's log-probabilities; `frozen` is the mode of weights without gradients."""
    tiles, mode = question.tiles, frozen or question.mode
    assert tiles is not None
    compute, weight = (4, 4) if mode == "fp32" else (2, 4 if mode == "autocast" else 2)
    width = facts.embedding_size or facts.word_embed_proj_dim or facts.hidden_size
    head = Head(
        tokens=tiles.scored * question.length / question.cp,
        hidden=float(width),
        vocabulary=facts.vocab_size / question.logit_parts,
        compute=compute,
        weight=weight,
        is_frozen=bool(frozen),
        is_tied=facts.tie_word_embeddings,
        on_cpu=question.on_cpu,
        logit=2 if question.mode == "pure" else 4,
    )
    forward, backward = (
        sizes.end.amount({term: size for term, size in moments[0].activations.items() if "V" not in term.split()})
        for moments in (form.loss, form.loss_backward)
    )
    ends = [moment for moment in form.loss_backward if "V b s" not in moment.activations]
    figures = replace(figures, loss_backward=_peaks(ends, sizes.end))
    return with_tiled_loss(figures, head, tiles, (forward, backward))


def _form_of(facts: ModelFacts, question: _Question, frozen: str = "") -> tuple[Form, int]:
    """Return the form of the code that runs, and how far its structure is from the model's.

    `frozen` is the precision mode of weights that get no gradients. Code bases other than transformers are written out
    for decoders; other kinds of models go by transformers' modules.
    """
    written = has_written_form(facts, question.code, question.length, compiled=question.compiled)
    plain = question.loss in ("plain", "tiled") or not facts.vocab_size
    loss = code_base(question.code).traits(compiled=question.compiled).loss
    is_split = question.logit_parts > 1 and question.code == "transformers"
    if plain and not written and not is_split and (loss is None or not facts.vocab_size):
        return _traced_form(facts, question, _frozen_modes(frozen))
    return _written_form(facts, question, blocks=written, loss="plain" if plain else question.loss, frozen=frozen)


def _frozen_modes(mode: str) -> Sequence[str]:
    """Return the traces that will do for frozen weights, the best first; those of trained ones for no mode."""
    if not mode:
        return ()
    return (f"frozen {mode}", "frozen pure") if mode == "mixed" else (f"frozen {mode}",)


def _written_form(
    facts: ModelFacts, question: _Question, *, blocks: bool, loss: Loss, frozen: str = ""
) -> tuple[Form, int]:
    """Return the form with blocks or a loss that were written down; what is neither is as it was traced."""
    from planner.cost.memory.activations import blocks as known  # takes milliseconds, and few ask

    mode, fixed = frozen or question.mode, bool(frozen)
    code, (width, residual) = code_base(question.code), known.WIDTHS[mode]
    traits = code.traits(compiled=question.compiled)
    if blocks and code.eager.block is not None:
        in_place = code.whole_gradients
        recomputed = question.recomputed or DEFAULT_RECOMPUTED
        form = known.code_form(
            facts, traits, mode, question.attention, adds_in_place=in_place, frozen=fixed, recomputed=recomputed
        )
        differences = 0
    else:
        form, differences = _traced_form(facts, question, _frozen_modes(frozen))
        if blocks and traits.block is not None:
            held = {"V h": float(residual)} if facts.tie_word_embeddings and not fixed else {}
            own = known.code_blocks(facts, traits.block, mode, question.attention, held, frozen=fixed)
            form, differences = replace(form, blocks=own), 0
    if loss == "plain":
        copies = traits.loss if code.eager.block is None else None
        if code.name == "transformers" and question.logit_parts > 1:
            copies = known.SPLIT_LOGITS
        return (form if copies is None else known.with_logits(form, copies, width)), differences
    rows = 1 / known.CHUNKS
    if loss == "fused":
        rows = known.fused_rows(question.length, facts.vocab_size, facts.hidden_size)
    weight = 4 if mode != "pure" else 2
    return known.with_loss(form, loss, width=width, weight=weight, rows=rows, frozen=fixed), differences


def has_written_form(facts: ModelFacts, code: str, length: int, *, compiled: bool) -> bool:
    """Return whether the code base's own blocks are counted, rather than transformers' eager ones.

    They are of decoders whose windows, where they have some, are no shorter than a sample or a matter of the code
    base's own attention kernels.
    """
    windowed = 0 < facts.sliding_window < length and not code_base(code).fuses_attention
    is_decoder = facts.kind == "decoder" and not facts.recorded_as and not windowed
    return is_decoder and code_base(code).traits(compiled=compiled).block is not None


def _traced_form(facts: ModelFacts, question: _Question, modes: Sequence[str] = ()) -> tuple[Form, int]:
    windows = question.attention == "sdpa" and 0 < facts.sliding_window < question.length
    attentions = _attentions(question.attention, windows=windows)
    devices = ("cpu", "cuda") if question.on_cpu else ("cuda",)
    modes_to_try = modes or (question.mode,)
    variants = [
        f"{device} {mode} {attention}" for attention, device, mode in product(attentions, devices, modes_to_try)
    ]
    nearest = find_form(structure_of(facts), variants)
    if nearest is None:
        raise LookupError(f"no memory form for {facts.model_type}")
    return nearest.form, nearest.differences


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Values of the symbols on one rank: in activations, with how its tokens are spread, and in weights."""

    tokens: Dimensions
    weights: Dimensions
    spread: Spread
    ends_whole: bool = False
    """Whether tp ranks that split sequences gather them behind the last block, in front of the norm and the head
    (`strategies/parallel/tensor.py`)."""

    @property
    def end(self) -> _Sizes:
        """Those of what comes after the blocks."""
        return replace(self, spread=replace(self.spread, tp=1)) if self.ends_whole else self

    def amount(self, polynomial: Polynomial) -> Amount:
        return per_rank(polynomial, self.tokens, self.spread)

    def fixed(self, polynomial: Polynomial) -> float:
        return sum(per_sample(polynomial, self.weights))


def _sizes(facts: ModelFacts, question: _Question) -> _Sizes:
    """Experts that are spread over ranks are whole there, and get the tokens of other ranks for those they send."""
    weights = model_dimensions(facts, question.tp) | _lengths(facts, question)
    tokens = weights | {"V": facts.vocab_size / question.logit_parts}
    spread = Spread(
        cp=question.cp,
        tp=question.tp if question.is_sequence_parallel else 1,
        uneven=question.imbalance if question.ep > 1 else 1.0,
    )
    ends_whole = question.is_sequence_parallel and question.code == "transformers"
    if question.ep == 1:
        return _Sizes(tokens=tokens, weights=weights, spread=spread, ends_whole=ends_whole)
    experts = {"E": facts.num_experts / question.ep, "m": tokens["m"] * question.tp}
    return _Sizes(tokens=tokens, weights=weights | experts, spread=spread, ends_whole=ends_whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchanges:
    """Bytes per sample that exchanges between ranks add.

    They come to what a block `kept`, and to the moments of its passes and of the head's.
    """

    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    head: float = 0.0


def _exchanges(facts: ModelFacts, question: _Question) -> _Exchanges:
    """Return what sequence and context parallelism exchange.

    Under sequence parallelism the input of a column-parallel product is all-gathered, and what a row-parallel one makes
    is whole until it is reduce-scattered: one whole residual stream in forward, two in backward (the gradient and the
    input once more). torch's DTensor keeps the inputs it gathered, of attention and of a dense MLP; Megatron-LM keeps
    its part and gathers again (arXiv 2205.05198, section 4.2.2).
    """
    width, length = 4 if question.mode == "fp32" else 2, question.length / question.cp
    stream = 0.0
    if question.is_sequence_parallel:
        stream = (1 - 1 / question.tp) * width * length * facts.hidden_size
    # Autocast casts the gathered input once for every product.
    attention, dense = (3, 1 + facts.gated_mlp) if question.mode == "autocast" else (1, 1)
    inputs = 0 if question.keeps_shards else attention if facts.is_moe else attention + dense
    forward, backward = exchange_elements(facts, question.exchange, question.tp, question.cp)
    exchanged = width * question.length
    # Merged outputs are laid out by heads, of which the next product's input is a copy.
    merged = 0.0
    if question.cp > 1 and question.exchange == "all-gather":
        merged = width * length * attention_widths(facts, question.tp)[0]
    return _Exchanges(
        kept=inputs * stream + merged,
        forward=stream + forward * exchanged,
        backward=2 * stream + backward * exchanged,
        head=0.0 if question.code == "transformers" else stream,
    )


def _with_exchanges(figures: Figures, exchanges: _Exchanges) -> Figures:
    if exchanges == _Exchanges():
        return figures
    blocks = [
        replace(
            block,
            kept=plus(block.kept, (0.0, exchanges.kept)),
            forward=_add_activations(block.forward, (0.0, exchanges.kept + exchanges.forward)),
            recomputed=_add_activations(block.recomputed, (0.0, exchanges.kept + exchanges.forward)),
            replayed=_add_activations(block.replayed, (0.0, exchanges.kept + exchanges.forward)),
            backward=_add_activations(block.backward, (0.0, exchanges.kept + exchanges.backward)),
        )
        for block in figures.blocks
    ]
    loss, loss_backward = (
        _add_activations(peaks, (0.0, exchanges.head)) for peaks in (figures.loss, figures.loss_backward)
    )
    return replace(figures, blocks=blocks, loss=loss, loss_backward=loss_backward)


def _partly_trained_figures(
    facts: ModelFacts,
    *,
    training: Training,
    adapter_traits: AdapterTraits,
    whole: Figures,
    frozen: Figures,
    lengths: Mapping[str, float],
) -> Figures:
    """Return the figures of a model of which a part is trained.

    A block is the `whole` model's, the `frozen` one's with what is trained beside it, or one that keeps nothing; the
    ends are each as it is trained.
    """
    blocks = []
    for full, fixed in zip(whole.blocks, frozen.blocks, strict=True):
        source = facts.kind.endswith("encoder-decoder") and full.name == "encoder"
        tokens = lengths["t"] if source or full.name == "image" else lengths["s"]
        for run, count in runs_of(training, full.name, full.count):
            if run.state == "trained":
                blocks.append(replace(full, count=count))
            elif run.state == "idle":
                blocks.append(replace(fixed, count=count, **_NOTHING_KEPT))
            else:
                addition = addition_of(facts, run, adapter_traits)
                blocks.append(_with_addition(replace(fixed, count=count), run, addition, tokens))
    head, ends = whole if training.head else frozen, whole if training.embedding else frozen
    return replace(
        frozen,
        blocks=blocks,
        before=ends.before,
        loss=head.loss,
        loss_backward=head.loss_backward,
        table_backward=ends.table_backward,
    )


_NOTHING_KEPT: dict[str, Any] = {
    **dict.fromkeys(("kept", "boundary", "products", "unused", "input", "once", "handed", "again", "waiting"), NOTHING),
    **dict.fromkeys(("backward", "recomputed", "replayed"), ()),
    "cast": 0.0,
}


def _with_addition(block: BlockFigures, run: Run, addition: Addition, tokens: float) -> BlockFigures:
    kept = (0.0, addition.kept * tokens)

    def more(peaks: Sequence[Peak], *, backward: bool = False) -> list[Peak]:
        extra = (addition.fixed, (addition.kept + addition.beside) * tokens)
        gradients = float(run.gradients) if backward else 0.0
        return [
            Peak(
                activations=plus(peak.activations, extra),
                cast=peak.cast + addition.cast,
                gradients=peak.gradients + gradients,
            )
            for peak in peaks
        ]

    return replace(
        block,
        kept=plus(block.kept, kept),
        products=plus(block.products, (0.0, addition.products * tokens)),
        cast=block.cast + addition.cast,
        forward=more(block.forward),
        backward=more(block.backward, backward=True),
        recomputed=more(block.recomputed),
        replayed=more(block.replayed),
    )


def _stacks(facts: ModelFacts, form: Form) -> Iterator[tuple[str, int, BlockForm]]:
    """Yield the model's kinds of blocks with their forms; a kind that another structure's form lacks takes its last."""
    for name, count in block_kinds(facts, windows="local" in form.blocks):
        yield name, count, form.blocks.get(name) or list(form.blocks.values())[-1]


def _attentions(attention: str, *, windows: bool) -> tuple[str, ...]:
    """Return the forms that will do, the best first: a model without fused attention has only one."""
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


def _figures(form: Form, blocks: list[BlockFigures], sizes: _Sizes, differences: int) -> Figures:
    return Figures(
        blocks=blocks,
        buffers=sizes.fixed(form.buffers),
        before=_peak(form.before, sizes),
        loss=_peaks(form.loss, sizes.end),
        loss_backward=_peaks(form.loss_backward, sizes.end),
        table_backward=_peaks(form.table_backward, sizes),
        differences=differences,
    )


def figures_of_form(form: Form, kinds: Sequence[str]) -> Figures:
    """Return the figures of a form in which only samples are symbols, of a module with blocks of these kinds."""
    sizes = _Sizes(tokens={}, weights={}, spread=WHOLE)
    blocks = [_block(name, kinds.count(name), block, sizes) for name, block in form.blocks.items()]
    return _figures(form, blocks, sizes, 0)


def _classifies(facts: ModelFacts) -> bool:
    """Return whether the head classifies text; its form is that of the language model with labels for words."""
    return bool(facts.vocab_size) and facts.architecture.endswith("ForSequenceClassification")


def _classifying(figures: Figures, form: Form, sizes: _Sizes) -> Figures:
    return replace(
        figures,
        loss=_peaks(form.loss, sizes),
        loss_backward=_peaks(form.loss_backward, sizes),
    )


def _block(name: str, count: int, form: BlockForm, sizes: _Sizes) -> BlockFigures:
    return BlockFigures(
        name=name,
        count=count,
        kept=sizes.amount(form.kept),
        cast=sizes.fixed(form.cast),
        buffers=sizes.fixed(form.buffers),
        boundary=sizes.amount(form.boundary),
        products=sizes.amount(form.products),
        unused=sizes.amount(form.unused),
        input=sizes.amount(form.input),
        once=sizes.amount(form.once),
        handed=sizes.amount(form.handed),
        again=sizes.amount(form.again),
        waiting=sizes.amount(form.waiting),
        forward=_peaks(form.forward, sizes),
        backward=_peaks(form.backward, sizes),
        recomputed=_peaks(form.recomputed, sizes),
        replayed=_peaks(form.replayed, sizes),
    )


def _peaks(moments: Sequence[Moment], sizes: _Sizes) -> list[Peak]:
    """Return the moments that can be the largest of their part for this model."""
    candidates = [_peak(moment, sizes) for moment in moments]
    corners = [_corners(peak) for peak in candidates]
    kept: list[int] = []
    for index, mine in sorted(enumerate(corners), key=lambda entry: -entry[1][0]):
        if not any(all(map(le, mine, corners[other])) for other in kept):
            kept.append(index)
    return [candidates[index] for index in sorted(kept)]


def _corners(peak: Peak) -> list[float]:
    """Return the moment's bytes where they are extreme.

    That is with few samples and many, cast weights counted or not, gradients freed at once or held at eight bytes per
    element. What a strategy makes of a moment lies between.
    """
    fixed, grows = peak.activations
    extremes = itertools.product(_FEW_AND_MANY, (peak.cast, 0.0), (_WIDEST * peak.gradients, 0.0))
    return [fixed + samples * grows + cast + gradients for samples, cast, gradients in extremes]


_FEW_AND_MANY = (1, 1024)
_WIDEST = 8.0


def _peak(moment: Moment, sizes: _Sizes) -> Peak:
    return Peak(
        activations=sizes.amount(moment.activations),
        cast=sizes.fixed(moment.cast),
        gradients=sizes.fixed(moment.gradients),
    )


def _traced_figures(job: Job, recipe: Recipe, traced: TracedActivations) -> Figures:
    """Return the figures of a module that was traced with its own batches.

    Where whole replicas keep all that forward made, the moments of the traced backward pass are the step's own. Other
    plans go by its blocks; where it has none that run one by one, by one of them, all of whose bytes are per sample.
    """
    configuration = job.configuration
    keeps_all = configuration.strategy in ("single", "ddp") and configuration.activation_checkpointing == "none"
    if keeps_all and traced.moments and configuration.pp == 1:
        return _replayed_figures(traced)
    if traced.figures is not None:
        return traced.figures
    count = sum(block.repeats for block in job.counts.blocks)
    trained = job.counts.trained
    cast = _cast_bytes(recipe, float(job.counts.largest_block))
    run = [Peak(activations=(0.0, traced.block), cast=cast)]
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
        backward=[
            Peak(
                activations=(0.0, traced.block + traced.backward - traced.kept),
                cast=cast,
                gradients=float(trained.largest_block),
            )
        ],
    )
    return Figures(
        blocks=[block] if count else [],
        buffers=traced.buffers,
        before=Peak(activations=(0.0, traced.kept - count * traced.block)),
        loss=[Peak(activations=(0.0, traced.forward - traced.kept))],
        loss_backward=[Peak(activations=(0.0, traced.backward - traced.kept))],
        table_backward=[Peak(activations=NOTHING, gradients=float(trained.outside_blocks))],
    )


def _replayed_figures(traced: TracedActivations) -> Figures:
    """Return the figures of the traced passes as they were."""
    return Figures(
        blocks=[],
        buffers=traced.buffers,
        before=Peak(activations=(0.0, traced.forward)),
        loss=[Peak(activations=NOTHING)],
        loss_backward=[],
        table_backward=[],
        moments=[
            Peak(activations=(moment.fixed, moment.per_sample), gradients=moment.gradients) for moment in traced.moments
        ],
    )


def _untraced_figures(job: Job, recipe: Recipe) -> Figures:
    """Return the figures of a module of which only the parameters are known.

    The blocks are taken as a transformer's of the same parameters: a block of P parameters of width h has P/h elements
    of matrix width per token, each kept once by the linear that reads it and once by what follows it.
    """
    hidden, length = max(job.facts.hidden_size, 1), job.configuration.sequence_length
    count = sum(block.repeats for block in job.counts.blocks)
    parameters = job.counts.in_blocks / count if count else 0.0
    cast = _cast_bytes(recipe, parameters)
    kept = 2.0 * recipe.compute * length * parameters / hidden
    run = [Peak(activations=(0.0, kept), cast=cast)]
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
        backward=[Peak(activations=(0.0, 2 * kept), cast=cast, gradients=parameters)],
    )
    logits = (0.0, 12.0 * length * job.facts.vocab_size)
    return Figures(
        blocks=[block] if count else [],
        buffers=0.0,
        before=Peak(activations=NOTHING),
        loss=[Peak(activations=logits)],
        loss_backward=[Peak(activations=logits, gradients=float(job.counts.head if job.counts.trains_all else 0))],
        table_backward=[Peak(activations=NOTHING, gradients=float(job.counts.embedding + job.counts.other))],
        differences=None,
    )


def _cast_bytes(recipe: Recipe, parameters: float) -> float:
    """Autocast's 16-bit copies of a block's weights; no other precision copies them."""
    return 2.0 * parameters if recipe.autocast else 0.0
