"""Form: the activations of an architecture, closed: polynomials in the dimensions of model and batch.

Forms are derived from traces of the real modules (`strategies.tracing.forms.derive`) and kept in `forms/`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeAlias

from hardware_db.records import dataclass
from planner.models.facts import ModelFacts

# Polynomials in the dimensions of a model and a batch give bytes or elements.


Polynomial: TypeAlias = Mapping[str, float]
ZERO: Polynomial = {}


def add(polynomials: Iterable[Polynomial]) -> dict[str, float]:
    """Return the sum, without terms that cancel."""
    total: dict[str, float] = {}
    for polynomial in polynomials:
        for term, coefficient in polynomial.items():
            total[term] = total.get(term, 0.0) + coefficient
    return {term: value for term, value in total.items() if value}


def scale(polynomial: Polynomial, factor: float) -> dict[str, float]:
    """Every coefficient times `factor`."""
    return {term: coefficient * factor for term, coefficient in polynomial.items()}


def subtract(left: Polynomial, right: Polynomial) -> dict[str, float]:
    """`left` less `right`."""
    return add((left, scale(right, -1.0)))


def multiply(left: Polynomial, right: Polynomial) -> dict[str, float]:
    """Return the product."""
    return add(
        {" ".join(sorted((*first.split(), *second.split()))): coefficient * other}
        for first, coefficient in left.items()
        for second, other in right.items()
    )


def value(polynomial: Polynomial, dimensions: Mapping[str, float]) -> float:
    """Return the number, with every symbol replaced.

    Raises:
        KeyError: a symbol has no value.
    """
    total = 0.0
    for term, coefficient in polynomial.items():
        for symbol in term.split():
            coefficient *= dimensions[symbol]
        total += coefficient
    return total


def per_sample(polynomial: Polynomial, dimensions: Mapping[str, float]) -> tuple[float, float]:
    """Return what does not depend on the samples of a batch (symbol `b`), and what each sample adds.

    `b` is left out of `dimensions`. No activation grows faster than the batch.

    Raises:
        KeyError: a symbol has no value.
    """
    fixed = grows = 0.0
    for term, coefficient in polynomial.items():
        symbols = term.split()
        batched = "b" in symbols
        for symbol in symbols:
            if symbol != "b":
                coefficient *= dimensions[symbol]
        if batched:
            grows += coefficient
        else:
            fixed += coefficient
    return fixed, grows


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The spread of a sample's tokens over ranks.

    Over `cp`, and over `tp` between the products that tensor parallelism splits where it is sequence parallelism too.
    `uneven` is by how much more tokens than the mean come to the experts of the busiest expert-parallel rank.
    """

    cp: int = 1
    tp: int = 1
    uneven: float = 1.0


WHOLE = Spread()
_SPLIT = frozenset("agfFVmxAG")
"""Symbols of widths that tensor parallelism splits: a tensor of one of them has all tokens of the rank."""
_ROTARY = frozenset("dR")


def per_rank(polynomial: Polynomial, dimensions: Mapping[str, float], spread: Spread) -> tuple[float, float]:
    """`per_sample` of a rank that has a part of the tokens.

    Tokens are in every term of a length; scores, whose term has two, are of a rank's queries and all keys. Without
    sequence parallelism the residual stream and what norms make of it are on every tp rank; with it each has its part
    (Korthikanti et al. 2022, arXiv 2205.05198, table 2): those are the terms of a token without a width that is split.

    Raises:
        KeyError: a symbol has no value.
    """
    if spread == WHOLE:
        return per_sample(polynomial, dimensions)
    fixed = grows = 0.0
    for term, coefficient in polynomial.items():
        symbols = term.split()
        for symbol in symbols:
            if symbol != "b":
                coefficient *= dimensions[symbol]
        if "s" in symbols or "t" in symbols:
            coefficient /= spread.cp
            if "b" in symbols and not _SPLIT.intersection(symbols) and ("h" in symbols or not _ROTARY & set(symbols)):
                coefficient /= spread.tp
            if "k" in symbols:
                coefficient *= spread.uneven
        if "b" in symbols:
            grows += coefficient
        else:
            fixed += coefficient
    return fixed, grows


# Models of one structure have the same memory form, whatever their sizes.


_FIELDS = (
    *("model_type", "kind", "tie_word_embeddings", "gated_mlp", "activation", "norm", "norms_per_layer"),
    *("final_norm", "qk_norm", "post_norm", "parallel_residual", "position_type", "sliding_window_pattern"),
    *("fused_qkv", "fused_gate_up", "embedding_layernorm", "mlm_transform", "shared_layers", "layer_scale"),
    *("new_decoder_architecture", "shared_expert_gate", "share_att_key", "pooler"),
)
_PRESENT = (
    *("hidden_dropout", "attention_dropout", "attn_logit_softcapping", "final_logit_softcapping"),
    *("num_shared_experts", "shared_expert_intermediate_size", "first_k_dense", "sliding_window"),
)


def structure_of(facts: ModelFacts) -> dict[str, str]:
    """Return the structure by field, in words; of a recorded model its name, since its form is nobody else's."""
    if facts.recorded_as:
        return {"model_type": facts.recorded_as, "kind": facts.kind}
    words = {name: str(getattr(facts, name)) for name in _FIELDS}
    words |= {name: str(bool(getattr(facts, name))) for name in _PRESENT}
    words["heads"] = _heads(facts)
    words["latent"] = str(facts.mla is not None and (2 if facts.mla.q_lora_rank else 1))
    words["moe"] = str(facts.is_moe)
    words["embedding"] = str(facts.embedding_size not in (0, facts.hidden_size))
    words["projected"] = str(facts.word_embed_proj_dim not in (0, facts.hidden_size))
    words["partly_rotated"] = str(facts.rotary_dim > 0 or facts.rotary_pct < 1)
    return words


def _heads(facts: ModelFacts) -> str:
    if facts.num_kv_heads == facts.num_heads:
        return "one key head each"
    return "one key head for all" if facts.num_kv_heads == 1 else "grouped"


def difference(one: dict[str, str], other: dict[str, str]) -> int:
    """Return in how many fields two structures differ."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One moment, without weights, inputs and what was there before the part that is running.

    `activations` in bytes; `cast`: bytes of autocast's copies of weights; `gradients`: elements of weights whose
    gradient this part has made.
    """

    activations: Polynomial
    cast: Polynomial
    gradients: Polynomial


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockForm:
    """One kind of block. All but the gradients of its moments in bytes.

    `kept` until its backward; `cast` copies of its weights that live as long; `buffers` of the module; `boundary`: its
    output, which is all that full checkpointing keeps; `products`: outputs of matrix products and attention, which
    selective checkpointing keeps as well, `unused` those of them that come after all that backward needs; `input`: what
    the block was given, where nothing but checkpointing keeps it. `once`: what the first block of the kind, and what
    lies between it and an earlier stack, keep beyond what the others do, such as T5's position bias, which all blocks
    are handed; `handed`: as much of it as is kept under checkpointing too; `again`: what the first block makes besides
    when it is run again; `waiting`: gradients of what is handed on, which are added up until the first block's
    backward.

    The moments that can be a peak: `forward` and `backward` over what was alive before the block, the latter with what
    the block itself kept; `recomputed` where the block runs again up to the last tensor that backward needs, `replayed`
    the same beside the products that are still to be used.
    """

    kept: Polynomial
    cast: Polynomial
    buffers: Polynomial
    boundary: Polynomial
    products: Polynomial
    unused: Polynomial
    input: Polynomial
    once: Polynomial = field(default_factory=dict)
    handed: Polynomial = field(default_factory=dict)
    again: Polynomial = field(default_factory=dict)
    waiting: Polynomial = field(default_factory=dict)
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    recomputed: tuple[Moment, ...]
    replayed: tuple[Moment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One architecture in one precision and with one kind of attention. `buffers`: bytes of those outside the blocks.

    `blocks` by the names that `planner.cost.memory.activations.dimensions` gives them; `before` is what the part in
    front of the blocks keeps, `loss` and `loss_backward` are moments of head and loss over what all blocks keep,
    `table_backward` those after the first block's backward, over `before`.
    """

    blocks: Mapping[str, BlockForm]
    buffers: Polynomial
    before: Moment
    loss: tuple[Moment, ...]
    loss_backward: tuple[Moment, ...]
    table_backward: tuple[Moment, ...]


# The files of the memory forms, one JSON file per model type.


TYPICAL = {"encoder": "bert", "encoder-decoder": "bart", "speech-encoder-decoder": "whisper", "vision": "vit"}
TYPICAL |= {"vision-text": "clip"}
FORMS = Path(__file__).parent / "forms"
FROZEN_ENDING = ".frozen"
"""Of the files with the forms of frozen weights, whose variants are `cuda frozen mixed sdpa` and the like."""
FROZEN_WORD = " frozen "


def with_heads_apart(form: Form, width: int) -> Form:
    """Return the form of a model of which one weight makes queries, keys and values of `width` bytes.

    Traced sizes do not tell these from three streams of the hidden width, and tp splits them. They are alive with what
    attention keeps.
    """
    fused = 3.0 * width

    def apart(polynomial: Polynomial) -> Polynomial:
        attends = "a b s" in polynomial or "a b s s" in polynomial
        if not attends or polynomial.get("b h s", 0.0) < fused:
            return polynomial
        stream, heads = polynomial["b h s"] - fused, polynomial.get("a b d s", 0.0) + fused
        return {**polynomial, "b h s": stream, "a b d s": heads}

    def told(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        return tuple(replace(moment, activations=apart(moment.activations)) for moment in moments)

    blocks = {
        name: replace(
            block,
            kept=apart(block.kept),
            forward=told(tuple(block.forward)),
            backward=told(tuple(block.backward)),
            recomputed=told(tuple(block.recomputed)),
            replayed=told(tuple(block.replayed)),
        )
        for name, block in form.blocks.items()
    }
    return replace(form, blocks=blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class NearestForm:
    """A form, and in how many fields the structure it was derived from differs from the model's."""

    form: Form
    differences: int


def find_form(structure: Mapping[str, str], variants: Sequence[str]) -> NearestForm | None:
    """Return the form of the structure nearest to this one, in the first of the variants that its model type has.

    A type that was never traced in any takes that of a typical model of its kind; None if that has none either.
    """
    for model_type in (structure["model_type"], TYPICAL.get(structure["kind"], "llama")):
        for variant in variants:
            stem = f"{model_type}{FROZEN_ENDING}" if FROZEN_WORD in variant else model_type
            entries = [entry for entry in _file(stem) if variant in entry["forms"]]
            if entries:
                distances = [difference(dict(structure), entry["structure"]) for entry in entries]
                nearest = distances.index(min(distances))
                return NearestForm(form=_form(entries[nearest]["forms"][variant]), differences=distances[nearest])
    return None


@functools.cache
def _file(stem: str) -> Sequence[Mapping[str, Any]]:
    path = FORMS / f"{stem}.json"
    if not path.is_file():
        return ()
    structures: Sequence[Mapping[str, Any]] = json.loads(path.read_text())["structures"]
    return structures


def form_to_dict(form: Form) -> dict[str, Any]:
    """Return the form as JSON keeps it."""
    return {
        "blocks": {name: _block_to_dict(block) for name, block in form.blocks.items()},
        "buffers": _numbers(form.buffers),
        "before": _moment_to_list(form.before),
        **{name: [_moment_to_list(moment) for moment in getattr(form, name)] for name in _ENDS},
    }


_ENDS = ("loss", "loss_backward", "table_backward")
_KEPT = ("kept", "cast", "buffers", "boundary", "products", "unused", "input", "once", "handed", "again", "waiting")
_PASSES = ("forward", "backward", "recomputed", "replayed")


def _block_to_dict(block: BlockForm) -> dict[str, Any]:
    moments = {name: [_moment_to_list(moment) for moment in getattr(block, name)] for name in _PASSES}
    kept = {name: _numbers(getattr(block, name)) for name in _KEPT}
    return {**{name: numbers for name, numbers in kept.items() if numbers}, **moments}


def _moment_to_list(moment: Moment) -> list[dict[str, float]]:
    return [_numbers(moment.activations), _numbers(moment.cast), _numbers(moment.gradients)]


def _numbers(polynomial: Polynomial) -> dict[str, float]:
    return {term: int(number) if number == int(number) else number for term, number in polynomial.items()}


def _form(written: Mapping[str, Any]) -> Form:
    return Form(
        blocks={name: _block(block) for name, block in written["blocks"].items()},
        buffers=written["buffers"],
        before=_moment(written["before"]),
        **{name: tuple(_moment(moment) for moment in written[name]) for name in _ENDS},
    )


def _block(written: Mapping[str, Any]) -> BlockForm:
    values: dict[str, Any] = {name: written.get(name, ZERO) for name in _KEPT}
    values |= {name: tuple(_moment(moment) for moment in written[name]) for name in _PASSES}
    return BlockForm(**values)


def _moment(written: Sequence[Polynomial]) -> Moment:
    activations, cast, gradients = written
    return Moment(activations=activations, cast=cast, gradients=gradients)
