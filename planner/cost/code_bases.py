"""Code bases as data: whose modules run.

Their traits, such as what is fused, kept for the backward, recomputed and overlapped, decide memory and time;
`code_bases.yaml` has a row for each, with the source of every trait.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from hardware_db.errors import BrokenFile, UnknownName
from hardware_db.handed_in import read_yaml
from hardware_db.records import dataclass
from planner.models.facts import ModelFacts
from planner.vocabulary import (
    CHECKPOINTINGS,
    DEGREES,
    OFFLOADS,
    SCHEDULES,
    STRATEGIES,
    Checkpointing,
    Degree,
    Offload,
    Schedule,
    Strategy,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """Counts of time that belong to code rather than to devices; docs/explanation/cost-model-time.md derives each one.

    Passes are elements read or written per element of the tensor, in the compute dtype, by one forward.
    `score_bytes` is the traffic of one attention score that is not fused away in the forward, `score_backward_bytes` in
    the backward, `loss_bytes` of one logit from cast to gradient, `attention_share` the rate of its fused attention
    over that of the kernels that were measured, `hopper_attention_share` that on Hopper besides (FlashAttention-3 and
    cuDNN's kernels over FlashAttention-2),
    `tuned_product_share` the rate of its products on Hopper and Blackwell over those that the ceilings are of,
    `hidden_tensor_parallel` which share of tensor parallelism's collectives runs beside the products that need them.
    `skips_masked` says whether fused attention leaves out the masked half of a causal product, `hides_reductions`
    whether gradients are reduced behind the backward, `reduces_whole` whether ZeRO-1 and 2 all-reduce gradients rather
    than reduce-scatter them, `broadcasts_partitions` whether they send updated parameters rank by rank,
    `selective_products` which share of the weight products selective checkpointing runs again, `stops_early` whether
    recomputing a block stops at the last tensor that its backward needs (torch's non-reentrant checkpoint since 2.0),
    `pads_vocabulary` whether tensor cores get a head of aligned width whatever the vocabulary is, `dispatches_by_node`
    whether a token for experts of another node goes there once, `overlaps_dispatch` whether the tokens of one
    micro-batch travel to experts beside the compute of another (`interleaved`: in such pipelines).
    """

    layer_norm_passes: float = 2.0
    rms_norm_passes: float = 18.0
    residual_passes: float = 3.0
    dropout_passes: float = 2.5
    activation_passes: float = 2.0
    composite_activation_passes: float = 20.0
    gated_passes: float = 5.0
    rotary_passes: float = 10.0
    dispatch_passes: float = 7.0
    dispatch_kernels: int = 14
    score_bytes: float = 24.0
    score_backward_bytes: float = 28.0
    loss_bytes: float = 30.0
    attention_share: float = 1.0
    hopper_attention_share: float = 1.0
    tuned_product_share: float = 1.0
    hidden_tensor_parallel: float = 0.0
    skips_masked: bool = True
    hides_reductions: bool = True
    reduces_whole: bool = True
    broadcasts_partitions: bool = False
    selective_products: float = 0.0
    stops_early: bool = True
    pads_vocabulary: bool = False
    dispatches_by_node: bool = False
    overlaps_dispatch: Literal["never", "interleaved", "always"] = "never"
    block_host_seconds: float = 0.85e-3
    kernel_host_seconds: float = 10e-6


TRANSFORMERS = Implementation()
"""transformers' modules in eager torch: what rates are stated for where no job says whose modules run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTraits:
    """Traits of a decoder block that decide what it keeps; `cost.memory.activations.blocks` makes bytes of them."""

    norm: Literal["composite", "fused"] = "composite"
    """`composite` keeps an fp32 copy of its input and the normalised one, `fused` the input itself and its scale."""
    rotary: Literal["composite", "fused"] = "composite"
    """`composite` makes halves and products beside what it rotates; neither keeps anything."""
    activation: Literal["composite", "fused"] = "composite"
    """Of a gated MLP `composite` keeps the activated gate too, `fused` only what goes in and comes out."""
    qkv: Literal["split", "fused"] = "split"
    """`fused`: q, k and v are views of one product's output, which the value keeps alive as a whole."""
    copies_value: bool = False
    """Whether attention that is fused copies a value that is a view, once queries and keys are tensors of their own."""
    weighs_experts: Literal["outputs", "activations"] = "outputs"
    """Where the router's weights are multiplied in: an expert's output is kept for it, its activation is anyway."""
    repeats_keys: bool = False
    """Whether keys and values are copied to every query head."""
    sums: Literal["kept", "recomputed"] = "kept"
    """`recomputed`: the norm after attention keeps attention's projection and adds the residual again (a compiler)."""
    keeps_sequence_shards: bool = False
    """Under sequence parallelism, whether a product's input stays sharded and is all-gathered again in the backward."""
    selective: Literal["products", "every-second-product", "attention"] = "products"
    """What selective checkpointing keeps: outputs of all products and of attention, only those of every second product
    and of attention, or everything but what is inside attention."""
    saved_score_bytes: float = 7.0
    """Kept per score of attention that is not fused, in 16 bit; dropout's mask and output are left out without it."""


class LogitBytes(TypedDict):
    """Logits alive at the loss and at its backward: copies in the compute dtype, and bytes besides."""

    forward: tuple[float, float]
    backward: tuple[float, float]


class StateBytes(TypedDict):
    """Widths of what replicas and sharded states hold in one precision; `planner.cost.precision.Recipe` names them."""

    weight: int
    gradient: int
    master: int
    compute: int
    residual: int
    gather: int
    reduce: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """One way in which a code base's modules run: eager, or under torch.compile."""

    time: Implementation = field(default_factory=Implementation)
    block: BlockTraits | None = None
    """None for modules whose memory forms were traced."""
    loss: LogitBytes | None = None
    """None where the traced form says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeBase:
    """A code base whose modules run."""

    name: str
    title: str
    """What it is, in a few words."""
    runs_with: str
    """The tool that trains with it; `dsplan` where `dsplan run` does."""
    loads: Literal["whole", "sharded", "gathered"]
    """Whether every process makes the whole model in host memory, or only what is its own; `gathered`: that, and a
    checkpoint is read into weights that FSDP has all-gathered at once on every device."""
    eager: Traits
    compiled: Traits | None = None
    """None where the code has no use for torch.compile, or is compiled as it is."""
    strategies: tuple[Strategy, ...] = STRATEGIES
    """What it spreads states by."""
    degrees: tuple[Degree, ...] = DEGREES
    """Over what else it can split the work on a sample."""
    whole_strategies: tuple[Strategy, ...] = ()
    """Those of its strategies that go with no such degree."""
    schedules: tuple[Schedule, ...] = SCHEDULES
    offloads: tuple[Offload, ...] = OFFLOADS
    checkpointings: tuple[Checkpointing, ...] = CHECKPOINTINGS
    key_heads: Literal["repeated", "gathered", "divided"] = "repeated"
    """Where tp is more than the heads of keys: each rank has the weights of one (as `dsplan run` does), or its part of
    them, with the products all-gathered; `divided`: it must divide them."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks split the sequence between their products unless told otherwise."""
    states: Mapping[str, StateBytes] = field(default_factory=dict)
    """By precision, where they are not what the strategy's own engine holds."""
    accumulator: Mapping[str, int] = field(default_factory=dict)
    """By precision: bytes per parameter of whole gradients beside those that are reduced."""
    whole_gradients: bool = False
    """Whether gradients lie in one buffer that is there from the first step on, which autograd adds to."""
    fuses_gradients: bool = False
    """Whether products add the gradients of their weights to that buffer themselves."""
    copies_shards: bool = False
    """Whether fewer ranks than there are can share ZeRO-1's states, in several copies."""
    whole_stages: bool = False
    """Whether FSDP holds a pipeline stage's weights and gradients whole until the last micro-batch of a step."""
    names_layers: bool = False
    """Whether the blocks of each pipeline stage can be named one by one."""
    lists_recomputed: bool = False
    """Whether selective recomputation takes a list of parts of a block (`vocabulary.RECOMPUTED_MODULES`)."""
    scaled_products: Literal["none", "torchao", "Transformer Engine"] = "none"
    """Whose linear layers multiply in 8 and 4 bits."""
    fuses_attention: bool = False
    """Whether kernels of its own fuse attention that transformers runs eagerly: with sinks, soft caps or biases."""
    unties_head: bool = False
    """Whether the head has a matrix of its own even where the model's config ties it to the token table."""
    adapters_from_peft: bool = False
    """Whether PEFT makes its adapters: in fp32 whatever the weights beside them are."""
    drops_adapter_inputs: bool = False
    """Whether adapters see their inputs through dropout, of which each keeps the output and a mask."""
    quantised_inputs: int = 0
    """Of how many micro-batches the inputs of 4-bit products are there when a forward ends: none since bitsandbytes
    0.44, one before; another where the loop holds the last micro-batch's loss until it has the next one."""
    dropout: float | None = None
    """Of hidden states and attention by default, None for what the model's config says."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each group of traits was read."""

    def __hash__(self) -> int:
        return hash(self.name)

    def traits(self, *, compiled: bool) -> Traits:
        """Return how its modules run."""
        return self.compiled if compiled and self.compiled is not None else self.eager

    @property
    def runs_here(self) -> bool:
        """True if `dsplan run` runs its code."""
        return self.runs_with == "dsplan"


_CATALOGUE = Path(__file__).with_suffix(".json")
_WRITTEN = Path(__file__).with_suffix(".yaml")
_REMEDY = "docs/explanation/code-bases.md has the keys of a code base's file"
_GROUPS = ("time", "block", "loss")
_CHOICES = {"strategies", "whole_strategies", "degrees", "schedules", "offloads", "checkpointings"}


@lru_cache(maxsize=64)
def code_base(name: str) -> CodeBase:
    """Return the code base of a name, or of a YAML file whose row begins with `like: NAME`.

    Raises:
        UnknownName: no row answers to the name, and there is no such file.
        BrokenFile: the file has an unknown key, or a key holds what it cannot.
    """
    rows = _rows()
    if name in rows:
        return _code_base(name, rows[name])
    if "." in name or "/" in name:
        return _handed_in(name)
    raise UnknownName("code", name, rows, hint=f"known are {', '.join(rows)}, and a FILE.yaml of one's own")


def code_names() -> tuple[str, ...]:
    """Return the names of the catalogue, in its order."""
    return tuple(_rows())


def of_any_year(name: str) -> str:
    """Return a code base whatever its version: the catalogue names older ones by their year."""
    stem, _, year = name.rpartition("-")
    return stem if len(year) == 4 and year.isdigit() else name


def facts_for_code(facts: ModelFacts, name: str) -> ModelFacts:
    """Return the model with the dropout that a code base trains it with, and the head that it gives it."""
    code = code_base(name)
    if code.unties_head and facts.tie_word_embeddings and facts.kind == "decoder":
        facts = replace(facts, tie_word_embeddings=False)
    if code.fuses_attention:
        facts = replace(facts, fuses_attention=True) if facts.eager_only else facts
    if code.dropout is None or facts.hidden_dropout:
        return facts
    return replace(facts, hidden_dropout=code.dropout, attention_dropout=code.dropout)


@lru_cache(maxsize=1)
def _rows() -> Mapping[str, Mapping[str, Any]]:
    rows: Mapping[str, Mapping[str, Any]] = json.loads(_CATALOGUE.read_text(encoding="utf-8"))
    return rows


def _code_base(name: str, row: Mapping[str, Any]) -> CodeBase:
    """Return the code base of a row that was checked when it was compiled."""
    compiled = row.get("compiled")
    plain = {key: row[key] for key in row.keys() - {*_GROUPS, "compiled", "like"}}
    plain |= {key: tuple(plain[key]) for key in _CHOICES & plain.keys()}
    return CodeBase(name=name, eager=_traits(row), compiled=_traits(compiled) if compiled else None, **plain)


def _traits(row: Mapping[str, Any]) -> Traits:
    return Traits(
        time=Implementation(**row.get("time", {})),
        block=BlockTraits(**row["block"]) if row.get("block") is not None else None,
        loss=row.get("loss"),
    )


# Rows as people and the catalogue write them: checked key by key, and filled up from the row that they are like.


def _handed_in(path: str) -> CodeBase:
    row = read_yaml(path, _REMEDY)
    return _code_base(Path(path).stem, checked_row(row, _rows(), path))


def compile_code_bases(path: Path = _WRITTEN) -> str:
    """Return the catalogue as JSON text, every `like` resolved.

    Raises:
        BrokenFile: a row has an unknown or ill-typed key, or no sources.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for name, row in read_yaml(path, "correct the row").items():
        if not isinstance(row, dict) or not row.get("sources"):
            raise BrokenFile(path, f"{name} has no sources", "cite where its traits come from")
        rows[name] = checked_row(row, rows, f"{path.name}, {name}")
    return json.dumps(rows, indent=1) + "\n"


def checked_row(row: object, entries: Mapping[str, Mapping[str, Any]], where: object) -> Mapping[str, Any]:
    """Return a row with every key checked and filled up from the one that it is `like`.

    Raises:
        BrokenFile: a key is unknown, missing or holds what it cannot.
    """
    from hardware_db.from_json import WrongValue, from_json  # msgspec is slow to import

    if not isinstance(row, dict):
        raise BrokenFile(where, "is not a mapping of traits", _REMEDY)
    like = row.get("like")
    if like is not None and (not isinstance(like, str) or like not in entries):
        raise BrokenFile(where, f"is like {like!r}, which is none of {', '.join(entries)}", _REMEDY)
    if like is None and entries and not {"title", "runs_with", "loads"} <= row.keys():
        raise BrokenFile(where, "has no `like: NAME` and not all of title, runs_with and loads", _REMEDY)
    full = {**(entries[like] if like else {}), **{key: value for key, value in row.items() if key != "like"}}
    if like and isinstance(row.get("sources"), dict):
        full["sources"] = {**entries[like].get("sources", {}), **row["sources"]}
    nested = {key: value for key, value in full.items() if key not in _GROUPS}
    nested["eager"] = {key: full[key] for key in _GROUPS if key in full}
    try:
        from_json(CodeBase, {"name": like or "", **nested})
    except WrongValue as problem:
        message = str(problem).removeprefix("eager.")
        for ours, theirs in (("are name,", "are like,"), (" eager,", f" {', '.join(_GROUPS)},")):
            message = message.replace(ours, theirs)
        raise BrokenFile(where, message, _REMEDY) from None
    for location, widths in full.get("states", {}).items():
        if unknown := widths.keys() - StateBytes.__annotations__.keys():
            raise BrokenFile(where, f"states.{location}.{min(unknown)} is not a key", _REMEDY)
    return full
