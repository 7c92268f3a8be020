"""Activations where not all is trained: blocks that gradients only pass through, and adapters beside their matrices.

A frozen matrix needs no input for its backward, so that frozen blocks have forms of their own. What is trained in them
adds inputs that are kept: a frozen block's trained matrix keeps its input, an adapter (PEFT 0.21, `tuners/lora`) keeps
its input and the product of rank width. Where adapters are fp32 under autocast, PEFT widens the input and autocast
narrows it again, so that each adapter keeps a copy of its own; without autocast each keeps the widened one. Beside a
quantised matrix under autocast (`lora/bnb.py`), and where adapters are as narrow as their input, matrices that read the
same input share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Literal

from hardware_db.records import dataclass
from planner.models.counting.adapters import is_linear
from planner.models.facts import Adapter, BlockCount, ModelFacts, ParameterCounts

State = Literal["trained", "frozen", "idle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A row of `repeats` like blocks.

    They are `trained`, `frozen` with gradients passing through, or `idle`: in front of all that is trained, so that no
    gradient reaches them. `inputs` are matrices of a frozen block that are trained, by name and width, `quantised`
    those that are not; `gradients` the elements of all that is trained in it, `largest` of its largest quantised
    matrix.
    """

    block: str
    repeats: int
    state: State
    inputs: tuple[tuple[str, int], ...] = ()
    quantised: tuple[tuple[str, int], ...] = ()
    adapters: tuple[Adapter, ...] = ()
    gradients: int = 0
    largest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The parts of a model that are trained: its blocks in the order they run, the embedding and the head."""

    runs: tuple[Run, ...]
    embedding: bool
    head: bool


@lru_cache(maxsize=64)
def training_of(counts: ParameterCounts) -> Training:
    """Return what is trained, of counts in which something is frozen."""
    fixed = set(counts.frozen)
    trained = [name for index, name in enumerate(counts.names) if index not in fixed]
    reached = any(name.startswith(("tokens", "positions", "patches")) for name in trained)
    runs: list[Run] = []
    for block in sorted(counts.blocks, key=lambda block: block.name != "vision"):
        run = _run(block, reached=reached)
        reached = reached or run.state != "idle"
        runs.append(run)
    head = any(name.startswith(("head", "classifier")) for name in trained)
    return Training(runs=tuple(runs), embedding="tokens.weight" in trained, head=head)


def _run(block: BlockCount, *, reached: bool) -> Run:
    fixed = set(block.frozen)
    linears = [index for index, name in enumerate(block.names) if is_linear(name, block.shapes[index])]
    inputs = tuple((block.names[index], block.shapes[index][-1]) for index in linears if index not in fixed)
    trained = block.trained
    if linears and len(inputs) == len(linears):
        return Run(block=block.name, repeats=block.repeats, state="trained")
    state: State = "frozen" if reached or trained.parameters else "idle"
    return Run(
        block=block.name,
        repeats=block.repeats,
        state=state,
        inputs=inputs,
        quantised=tuple((block.names[index], block.shapes[index][-1]) for index in linears if index in fixed),
        adapters=block.adapters,
        gradients=trained.parameters,
        largest=max((prod(block.shapes[index]) for index in linears if index in fixed), default=0),
    )


_COUNTED_AS = {"image": ("vision",), "expert": ("moe",), "dense": ("dense",)}


def runs_of(training: Training, kind: str, count: int) -> Iterator[tuple[Run, int]]:
    """Yield the runs among `count` blocks of a kind, by the name that activations have for it, each with its blocks."""
    names = _COUNTED_AS.get(kind, (kind,))
    runs = [run for run in training.runs if run.block in names] or [
        run for run in training.runs if run.block in ("decoder", "encoder", "vision", "text", "moe")
    ]
    merged = [
        (run, sum(each.repeats for each in alike))
        for run, alike in groupby(runs, key=lambda run: replace(run, repeats=1))
    ]
    total, left = sum(repeats for _, repeats in merged), count
    for index, (run, repeats) in enumerate(merged):
        share = left if index == len(merged) - 1 else min(left, round(count * repeats / total))
        if share:
            yield run, share
        left -= share


# Bytes that adapters and single trained matrices add to a frozen block.


_READS = {
    **dict.fromkeys(("q", "k", "v", "qkv", "q_a", "kv_a"), "attention's input"),
    **dict.fromkeys(("gate", "up", "gate_up"), "MLP's input"),
}
_SPLIT_INPUTS = ("o", "down")
"""Matrices whose inputs tensor parallelism splits."""
_KEEPS_OUTPUT = ("relu",)
"""Activations whose backward takes their output, which is therefore there anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """Memory that a frozen block takes more for the sake of what is trained in it.

    Bytes per token `kept` to its backward and `beside` it while the block is at work, bytes whatever the tokens in
    `fixed`, outputs of `products` per token, and 16-bit copies of adapters in `cast`.
    """

    kept: float = 0.0
    beside: float = 0.0
    fixed: float = 0.0
    products: float = 0.0
    cast: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTraits:
    """Traits of a job that additions depend on.

    How its form was traced, `tp`, whether attention is written out, whether frozen matrices are quantised, and what the
    code base says: how often they keep their inputs then, whether adapters drop a part of theirs, and whether queries,
    keys and values are one product. `widened` marks fp32 adapters beside 16-bit weights without autocast.
    """

    mode: str
    tp: int
    eager: bool
    quantised: bool
    kept_inputs: int = 0
    drops: bool = False
    one_product: bool = False
    widened: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element of what is multiplied."""
        return 4 if self.mode == "fp32" else 2

    @property
    def adapter_width(self) -> int:
        """Bytes of an element of what adapters multiply."""
        return 4 if self.widened else self.width

    @property
    def autocast(self) -> bool:
        """True if products are cast, weights being wider."""
        return self.mode in ("autocast", "mixed")


def addition_of(facts: ModelFacts, run: Run, traits: AdapterTraits) -> Addition:
    """Return the addition of one block of a run."""
    if run.state != "frozen":
        return Addition()
    width = traits.width
    dequantised = DEQUANTISED_BYTES * run.largest / traits.tp if traits.quantised else 0.0
    names = [(adapter.name, adapter.inputs) for adapter in run.adapters] or list(run.inputs)
    if traits.drops and run.adapters:
        kept = (width + MASK_BYTES) * sum(_dropped_inputs(names, traits))
        names = []
    else:
        kept = 0.0
    if traits.quantised and traits.kept_inputs:
        kept += width * (traits.kept_inputs - 1) * sum(_inputs(facts, run.quantised, traits, anyway=True))
        names = [*names, *run.quantised]
    kept += traits.adapter_width * sum(_inputs(facts, names, traits))
    kept += traits.adapter_width * sum(adapter.rank for adapter in run.adapters)
    if _stays_fp32(facts, traits):
        kept += 2 * facts.intermediate_size / traits.tp
    elements = sum(adapter.rank * (adapter.inputs + adapter.outputs) for adapter in run.adapters)
    products = traits.adapter_width * sum(adapter.rank + adapter.outputs / traits.tp for adapter in run.adapters)
    widened = (traits.widened or (traits.autocast and not traits.quantised)) and bool(run.adapters)
    decomposed = [adapter for adapter in run.adapters if adapter.magnitude]
    if decomposed:
        # The magnitude's gradient takes the frozen product and the adapter's (`lora/dora.py`, forward).
        kept += (width + traits.adapter_width) * sum(adapter.outputs for adapter in decomposed) / traits.tp
    largest = max((adapter.inputs * adapter.outputs for adapter in decomposed), default=0)
    return Addition(
        kept=kept,
        beside=WIDENED_BYTES * max(adapter.inputs for adapter in run.adapters) if widened else 0.0,
        fixed=dequantised + DECOMPOSED_BYTES * largest / traits.tp,
        products=products,
        cast=2.0 * elements if traits.autocast else 0.0,
    )


MASK_BYTES = 1
"""Dropout's mask, per element (torch native_dropout)."""
DEQUANTISED_BYTES = 2.0
"""A quantised matrix is made 16-bit for each product, forward and backward (bitsandbytes `autograd/_functions.py`,
MatMul4Bit)."""
WIDENED_BYTES = 4.0
"""PEFT casts an adapter's input to fp32, the adapter's dtype, and backward its gradient (`tuners_utils`,
_cast_input_dtype)."""
DECOMPOSED_BYTES = 16.0
"""DoRA's weight norm: the frozen matrix, the adapters' product, its scaled copy and the sum, in fp32 (`lora/dora.py`,
get_weight_norm)."""


def _dropped_inputs(names: Sequence[tuple[str, int]], traits: AdapterTraits) -> Iterator[float]:
    """Yield elements per token of what dropout makes for these matrices' adapters, once for a single product."""
    whole: dict[str, float] = {}
    for name, inputs in names:
        role = name.rpartition(".")[0]
        part = role.rpartition(".")[2]
        elements = inputs / traits.tp if part in _SPLIT_INPUTS else float(inputs)
        one = traits.one_product and part in ("q", "k", "v")
        whole[role.removesuffix(part) + ("qkv" if one else part)] = elements
    yield from whole.values()


def _inputs(
    facts: ModelFacts, names: Sequence[tuple[str, int]], traits: AdapterTraits, *, anyway: bool = False
) -> Iterator[float]:
    """Elements per token of the inputs that are kept for these matrices, those that are kept `anyway` too if asked."""
    shared: dict[str, float] = {}
    for name, inputs in names:
        role = name.rpartition(".")[0]
        part = role.rpartition(".")[2]
        elements = inputs / traits.tp if part in _SPLIT_INPUTS else float(inputs)
        if _has_own_copy(facts, part, traits):
            yield elements
        elif anyway or part not in _kept_anyway(facts, traits):
            shared[role.removesuffix(part) + _READS.get(part, part)] = elements
    yield from shared.values()


def _has_own_copy(facts: ModelFacts, part: str, traits: AdapterTraits) -> bool:
    """Return whether autocast, or an adapter wider than its matrix, makes a copy of an input for each product."""
    if not traits.autocast:
        return traits.widened
    return not traits.quantised or (_stays_fp32(facts, traits) and part != "o")


def _stays_fp32(facts: ModelFacts, traits: AdapterTraits) -> bool:
    """Return whether what reads a norm's output gives fp32.

    bitsandbytes' layers give back the dtype that they were given, and LayerNorm gives fp32 under autocast; RMSNorm, as
    it is written out in Python, the dtype of the weights.
    """
    return traits.quantised and traits.autocast and facts.norm != "rmsnorm"


def _kept_anyway(facts: ModelFacts, traits: AdapterTraits) -> Mapping[str, bool]:
    """Parts whose inputs the frozen block keeps by itself."""
    return {
        **({} if traits.eager else {"o": True}),
        **({"down": True} if facts.activation in _KEEPS_OUTPUT and not facts.gated_mlp else {}),
    }
