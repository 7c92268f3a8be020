"""Bytes per parameter of each training recipe: what weights, gradients and optimizer states cost before sharding.

Sources: ZeRO (Rajbhandari et al. 2020, section 3) for the mixed-precision recipe 2 + 2 + K; torch's autocast and AMP
notes for weights that stay fp32; DeepSpeed 0.19 `stage_1_and_2.py` and `stage3.py`, which keep a copy of partitions
in every dtype: bf16 for `bf16-pure`, fp32 for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from hardware_db.device import Device
from hardware_db.records import dataclass
from planner.cost.code_bases import CodeBase, code_base, code_names
from planner.cost.memo import memo_by_fields
from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from planner.vocabulary import (
    FSDP_STRATEGIES,
    MIXED_PRECISIONS,
    SCALED_PRECISIONS,
    UNSHARDED,
    ZERO_STAGES,
    Compression,
    Fp8Recipe,
    LoadDtype,
    Precision,
)

# Bytes of a compressed gradient: sent between ranks, and stored as rounding error.


INT8_BLOCK = 1024
"""Gradients that share a scale, unless a config's `communication.block_size` says otherwise."""
SCALE_BYTES = 4
"""A block's scale is fp32."""
INT8_BYTES = 1 + SCALE_BYTES / INT8_BLOCK
ERROR_BYTES = 2


def communication_bytes(compression: Compression, width: float) -> float:
    """Bytes of a gradient between ranks, `width` where nothing compresses it."""
    if compression == "int8":
        return INT8_BYTES
    return width if compression == "none" else 2.0


# Bytes of optimizer state per parameter when states are fp32. bitsandbytes keeps two 8-bit moments plus one fp32 scale
# per block of 256 values for each, torchao's 4-bit Adam two of 4 bits with one per 128, its fp8 Adam two of a byte with
# one per 256 (`torchao/optim/subclass_*.py`); adafactor's factored moments, and those of Muon, which has one for a
# matrix and AdamW's two for the rest, are counted from the matrices instead (see states.py).
STATE_BYTES = {
    "adamw": 8.0,
    "adamw-fused": 8.0,
    "adamw-forloop": 8.0,
    "adamw-8bit": 2.0 + 2 * 4 / 256,
    "adamw-8bit-paged": 2.0 + 2 * 4 / 256,
    "adamw-4bit": 1.0 + 2 * 4 / 128,
    "adamw-fp8": 2.0 + 2 * 4 / 256,
    "sgd": 0.0,
    "adafactor": 0.0,
    "lion": 4.0,
    "muon": 4.0,
}
QUANTISED_STATES = ("adamw-8bit", "adamw-8bit-paged", "adamw-4bit", "adamw-fp8")
"""Optimizers whose moments are as wide whatever the weights are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Bytes per parameter, and the widths that activations and collectives use.

    `weight`, `gradient`: of the tensors that live between steps; `master`: of a copy the optimizer keeps;
    `state`: optimizer moments; `compute`: of the dtype matrices multiply in; `residual`: of the residual stream between
    blocks; `gather` and `reduce`: of parameters and gradients on the wire. `autocast` marks fp32 weights cast on the
    fly. `scaled` says how linear layers of blocks multiply in 8 or 4 bits, `block_gather` what an all-gather of their
    weights takes where it is not `gather`. `frozen`: of weights that are not trained, `quantised` of those of linear
    layers in blocks where they are loaded narrower still; None where they are as the trained ones.
    """

    weight: int
    gradient: int
    master: int
    state: float
    compute: int
    residual: int
    gather: int
    reduce: int
    autocast: bool
    scaled: ScaledProducts | None = None
    block_gather: float | None = None
    frozen: float | None = None
    quantised: float | None = None

    @property
    def gather_of_blocks(self) -> float:
        """Bytes per parameter of a block on the wire."""
        return self.gather if self.block_gather is None else self.block_gather

    @property
    def frozen_width(self) -> float:
        """Bytes of a frozen weight that is not quantised."""
        return self.weight if self.frozen is None else self.frozen

    @property
    def frozen_gather(self) -> float:
        """Bytes of it once it is all-gathered: those it is loaded as, or those of compute where they are fewer."""
        return self.gather if self.frozen is None else min(self.frozen, self.gather)

    @property
    def dequantises(self) -> bool:
        """True if frozen weights are dequantised to be computed with."""
        return self.quantised is not None


RECIPE_FIELDS = (
    *("strategy", "backend", "precision", "optimizer", "gradient_compression", "offload"),
    *("dp_shard", "cp", "tp", "pp", "accumulates"),
)
"""What a recipe reads of a configuration."""

NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""bitsandbytes' nf4 with double quantisation: half a byte, and for 64 values a scale of one byte, of which 256 share
an fp32 (QLoRA, arXiv 2305.14314, section 3; bitsandbytes `functional.quantize_4bit`, compress_statistics)."""
INT8_LOADED_BYTES = 1.0
"""bitsandbytes' `Linear8bitLt` keeps a byte per weight and an fp32 per row, which is not counted (recalled)."""
LOADED_BYTES: dict[LoadDtype, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": INT8_LOADED_BYTES, "nf4": NF4_BYTES}


@memo_by_fields(*RECIPE_FIELDS)
def recipe_of(job: Job) -> Recipe:
    """Return the recipe that a backend follows for a precision.

    docs/explanation/strategies.md, "What a precision means", has them. A code base that trains replicas and ZeRO's
    stages by an engine of its own has its own.
    """
    configuration, workload = job.configuration, job.workload
    code = code_base(job.workload.code)
    if has_own_states(code, configuration):
        widths = code.states[stored_precision(configuration)]
        recipe = Recipe(**widths, state=STATE_BYTES[configuration.optimizer], autocast=False)
    elif configuration.backend == "native":
        recipe = _native_recipe(configuration)
    else:
        recipe = _recipe(configuration)
    narrow = configuration.gradient_compression in ("fp16", "bf16") and configuration.strategy in FSDP_STRATEGIES
    if narrow and configuration.backend != "native":
        recipe = replace(recipe, reduce=2)
    loaded, scaled = load_dtype_of(workload), None if configuration.backend == "native" else scaled_products(job)
    recipe = recipe if loaded is None else _as_loaded(recipe, loaded, trains_all=job.counts.trains_all)
    if keeps_adapters_wide(configuration, workload):
        recipe = replace(recipe, weight=4, gradient=4, state=STATE_BYTES[configuration.optimizer], reduce=4)
    return recipe if scaled is None else _with_scaled(recipe, scaled, configuration)


def load_dtype_of(workload: Workload) -> LoadDtype | None:
    """Return what the weights are loaded as: what was asked for, else None for what the precision says.

    Beside adapters that are nf4 for QLoRA and else what is computed in.
    """
    if workload.load_dtype is not None or workload.method == "full":
        return workload.load_dtype
    if workload.method == "qlora":
        return "nf4"
    return "fp32" if workload.precision == "fp32" else "fp16" if workload.precision == "fp16" else "bf16"


def keeps_adapters_wide(configuration: Configuration, workload: Workload) -> bool:
    """Return whether adapters are fp32 beside weights that all else is computed in, which have 16 bits.

    PEFT makes them so whatever the base (`autocast_adapter_dtype`); where they are sharded or split together with it
    they are as narrow as the weights.
    """
    if configuration.precision != "bf16-pure" or workload.method not in ("lora", "qlora", "dora"):
        return False
    is_whole = configuration.strategy in UNSHARDED and configuration.tp == configuration.pp == 1
    return is_whole and code_base(workload.code).adapters_from_peft


def _as_loaded(recipe: Recipe, loaded: LoadDtype, *, trains_all: bool) -> Recipe:
    """Return a recipe where weights are loaded in a dtype of their own.

    Those that are trained keep it under autocast and FSDP, with gradients and moments as wide; frozen ones do
    everywhere, and what a quantised model leaves as it is has 16 bits, or those of compute.
    """
    width = LOADED_BYTES[loaded]
    if not trains_all:
        plain = float(max(width, 2)) if width >= 2 else float(recipe.compute)
        return replace(recipe, frozen=plain, quantised=width if width < 2 else None)
    if width == recipe.weight or recipe.master:
        return recipe  # ZeRO casts what it is given
    scale = width / recipe.weight
    narrow = int(width)
    return replace(
        recipe,
        weight=narrow,
        gradient=narrow,
        state=recipe.state * scale,
        residual=min(recipe.residual, narrow) if narrow < 4 else recipe.residual,
        gather=min(recipe.gather, narrow),
        reduce=recipe.reduce if not recipe.autocast else narrow,
        autocast=recipe.autocast and narrow == 4,
    )


def _with_scaled(recipe: Recipe, scaled: ScaledProducts, configuration: Configuration) -> Recipe:
    """Return the recipe with scaled products: weights, gradients and masters stay those of bf16.

    What is cached beside weights is not where they are sharded, since each all-gather is followed by a cast of its own.
    """
    is_cut = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage == 3
    return replace(
        recipe,
        weight=recipe.weight + (0 if is_cut else scaled.cached),
        scaled=scaled,
        block_gather=scaled.gather if configuration.strategy in scaled.gathered_by else None,
    )


def has_own_states(code: CodeBase, configuration: Configuration) -> bool:
    """Return whether a code base's own engine holds a configuration's states, rather than torch's or DeepSpeed's."""
    return stored_precision(configuration) in code.states and configuration.strategy in OWN_ENGINES


def stored_precision(configuration: Configuration) -> Precision:
    """Return the precision that states are held in: 8-bit and 4-bit products leave them in bf16."""
    return "bf16" if configuration.precision in SCALED_PRECISIONS else configuration.precision


OWN_ENGINES = ("single", "ddp", "zero1")
"""What Megatron and nanotron train by an optimizer of their own: replicas, and states sharded over them."""


def _recipe(configuration: Configuration) -> Recipe:
    state = STATE_BYTES[configuration.optimizer]
    is_zero = configuration.strategy in ZERO_STAGES
    precision = configuration.precision
    if precision == "bf16-pure":
        narrow_state = state if configuration.optimizer in QUANTISED_STATES else state / 2
        return Recipe(
            weight=2,
            gradient=2,
            master=2 if is_zero else 0,
            state=narrow_state,
            compute=2,
            residual=2,
            gather=2,
            reduce=2,
            autocast=False,
        )
    if precision == "fp32":
        master = 4 if is_zero else 0
        return Recipe(
            weight=4, gradient=4, master=master, state=state, compute=4, residual=4, gather=4, reduce=4, autocast=False
        )
    if is_zero:
        return Recipe(
            weight=2, gradient=2, master=4, state=state, compute=2, residual=2, gather=2, reduce=2, autocast=False
        )
    if configuration.strategy in ("single", "ddp"):
        return Recipe(
            weight=4, gradient=4, master=0, state=state, compute=2, residual=4, gather=4, reduce=4, autocast=True
        )
    return Recipe(
        weight=4, gradient=4, master=0, state=state, compute=2, residual=2, gather=2, reduce=4, autocast=False
    )


def accumulates_in_fp32(configuration: Configuration) -> bool:
    """Return whether our own ZeRO adds gradients up in fp32 unless the script's config says otherwise.

    Sums over micro-batches lose bits in 16-bit types; a sum over ranks alone is rounded once.
    """
    return configuration.precision in MIXED_PRECISIONS and configuration.accumulates


def _native_recipe(configuration: Configuration) -> Recipe:
    """Return the recipe of our own ZeRO (`strategies/backends/zero/settings.py`).

    Masters are only where weights are 16-bit and states are not, and gradients that wait for several micro-batches in
    fp32. Stage 3's sharded weights are the masters, cast as they are all-gathered.
    """
    state, precision = STATE_BYTES[configuration.optimizer], configuration.precision
    width = 4 if precision == "fp32" else 2
    mixed = precision in MIXED_PRECISIONS
    narrow = precision == "bf16-pure" and configuration.optimizer not in QUANTISED_STATES
    is_cut = configuration.zero_stage == 3 and configuration.state_shards > 1 and configuration.offload == "none"
    return Recipe(
        weight=4 if mixed and is_cut else width,
        gradient=4 if accumulates_in_fp32(configuration) else width,
        master=4 if mixed and not is_cut else 0,
        state=state / 2 if narrow else state,
        compute=width,
        residual=width,
        gather=width,
        reduce=width,
        autocast=False,
    )


# Products of 8-bit and 4-bit operands: who makes them, on which devices, and what they cost beside the products.


RECIPES_OF: Mapping[str, tuple[Fp8Recipe, ...]] = {
    "torchao": ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"),
    "Transformer Engine": ("tensorwise", "blockwise", "mxfp8", "nvfp4"),
}

EAGER_CAST_BYTES = 35.0
"""Bytes that eager torch moves to cast one bf16 element (torchao@36027d82 `float8_utils.py`, kernel by kernel: |x| 4,
its maximum 2, to fp32 6, times the scale 8, clamped 8, to 8 bits 5, and 2 for the order of the other product)."""

Smallest = Literal["", "tensorwise", "rowwise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledProducts:
    """Linear layers of blocks that multiply in 8 or 4 bits; all else, the output head and attention too, stays in bf16.

    `dtype` names the peak; `operand` are bytes of an operand's element with its scales. `activation_casts` and
    `weight_casts` are bytes that casts read and write per element, for both orders of it that products need: of an
    input or an output's gradient once each, of a weight in every micro-batch; `casts_shards` says that under tensor
    parallelism each rank casts its part of a sequence, which is then all-gathered in 8 bits. `saved` are bytes kept for
    the backward of an element of a layer's input, None where the 16-bit tensor itself is kept; `saved_apart` says that
    layers that share an input keep a copy each. `cached` are bytes of weights kept in 8 bits beside the others,
    `gather` those that an all-gather of weights takes under the strategies in `gathered_by`. `smallest` names torchao's
    rule for layers too small to gain, `blocks` the share of blocks that run so.
    """

    dtype: Literal["fp8", "fp4"]
    operand: float
    activation_casts: float
    weight_casts: float
    saved: float | None = None
    saved_apart: bool = False
    cached: int = 0
    gather: float = 2.0
    gathered_by: frozenset[str] = frozenset()
    casts_shards: bool = False
    smallest: Smallest = ""
    blocks: float = 1.0

    def takes(self, outputs: float, inputs: float) -> bool:
        """Return whether a layer of these widths is converted (torchao@36027d82 `float8_linear_utils.py`)."""
        if self.smallest == "tensorwise":
            return inputs > 4096 or outputs > 1024
        if self.smallest == "rowwise":
            return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
        return True


MX = 1 + 1 / 32
"""Bytes of an MXFP8 element: 32 share a scale of one byte."""
NV = 0.5 + 1 / 16
"""Bytes of an NVFP4 element: 16 share a scale of one byte."""
_SHARDED = frozenset({*FSDP_STRATEGIES, "zero3"})
_OWNED = frozenset({"zero1", "zero2"})

_TORCHAO: Mapping[Fp8Recipe, ScaledProducts] = {
    # Casts as torchao counts them itself: `torchao/testing/training/roofline_utils.py` at 36027d82.
    "tensorwise": ScaledProducts(
        dtype="fp8",
        operand=1.0,
        activation_casts=6.0,
        weight_casts=8.0,
        gather=1.0,
        gathered_by=FSDP_STRATEGIES,
        casts_shards=True,
        smallest="tensorwise",
    ),
    # Counted 8, but a maximum along columns does not run at a copy's speed: 20, fitted to torchao's own H100 table.
    "rowwise": ScaledProducts(dtype="fp8", operand=1.0, activation_casts=20.0, weight_casts=10.0, smallest="rowwise"),
    "blockwise": ScaledProducts(dtype="fp8", operand=1.0, activation_casts=6.0, weight_casts=6.0),
    # Counted 6; 20 with what surrounds the casts, fitted to torchao's own B200 table.
    "mxfp8": ScaledProducts(dtype="fp8", operand=MX, activation_casts=20.0, weight_casts=4 + 2 * MX),
    # `nvfp4_linear.py`: a rotation and its maximum, then both orders; only codes are saved. Its kernels alone take as
    # long as 18 bytes of an activation and 25 of a weight at a copy's speed on a GB200
    # (`benchmarks/prototype/nvfp4_training/README.md`); 34 with what surrounds them, fitted to torchtitan@b5bcd76c
    # `nvfp4.md`, whose last 15 % of blocks stay in bf16.
    "nvfp4": ScaledProducts(
        dtype="fp4",
        operand=NV,
        activation_casts=34.0,
        weight_casts=25.0,
        saved=NV,
        saved_apart=True,
        blocks=0.85,
    ),
}
_TRANSFORMER_ENGINE: Mapping[Fp8Recipe, ScaledProducts] = {
    # TransformerEngine@d0067d0d `module/linear.py`: a kernel reads 16 bits and writes both orders; of an input the one
    # that the weight's gradient needs is kept. Megatron-Bridge@067f987d `mixed_precision.py`: weights themselves are
    # in 8 bits in both orders (so two bytes, as of bf16) and all-gathered so (`fp8_param_gather`), but for blockwise.
    "tensorwise": ScaledProducts(
        dtype="fp8", operand=1.0, activation_casts=6.0, weight_casts=0.0, saved=1.0, gather=1.0, gathered_by=_OWNED
    ),
    "blockwise": ScaledProducts(dtype="fp8", operand=1.0, activation_casts=4.0, weight_casts=0.0, saved=1.0, cached=2),
    "mxfp8": ScaledProducts(
        dtype="fp8",
        operand=MX,
        activation_casts=2 + 2 * MX,
        weight_casts=0.0,
        saved=MX,
        gather=MX,
        gathered_by=_OWNED,
    ),
    "nvfp4": ScaledProducts(
        dtype="fp4", operand=NV, activation_casts=4 + 2 * NV, weight_casts=0.0, saved=NV, gather=NV, gathered_by=_OWNED
    ),
}


def scaled_products(job: Job) -> ScaledProducts | None:
    """Return how a job's linear layers multiply in 8 or 4 bits; None where they do not, or nothing that runs it can."""
    precision = job.configuration.precision
    if precision not in SCALED_PRECISIONS:
        return None
    library = code_base(job.workload.code).scaled_products
    recipe = job.workload.fp8_recipe or usual_recipe(job.cluster.device, precision)
    if library == "Transformer Engine":
        products = _TRANSFORMER_ENGINE.get(recipe, _TRANSFORMER_ENGINE["tensorwise"])
        # Sharded weights are cast after each all-gather.
        casts = 4.0 if job.configuration.strategy in _SHARDED else products.weight_casts
        return _with_casts(products, products.activation_casts, casts, casts_shards=True)
    products = _TORCHAO[recipe]
    if job.workload.compile:
        return products
    return _with_casts(products, EAGER_CAST_BYTES, EAGER_CAST_BYTES, casts_shards=products.casts_shards)


@lru_cache(maxsize=64)
def _with_casts(
    products: ScaledProducts, activation_casts: float, weight_casts: float, *, casts_shards: bool
) -> ScaledProducts:
    """Return the products with other casts, the same object each time: memos tell it apart by identity."""
    return replace(products, activation_casts=activation_casts, weight_casts=weight_casts, casts_shards=casts_shards)


def usual_recipe(device: Device, precision: Precision) -> Fp8Recipe:
    """Return what a device's own units scale: blocks of 32 where it has them (Blackwell), else whole tensors."""
    if precision == "fp4":
        return "nvfp4"
    return "mxfp8" if (10, 0) <= capability_of(device) < (12, 0) else "tensorwise"


def capability_of(device: Device) -> tuple[int, int]:
    """Compute capability of an NVIDIA device; (0, 0) of others."""
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def why_not_scaled(device: Device, precision: Precision, recipe: Fp8Recipe | None, code: str) -> str | None:
    """Return why linear layers cannot multiply so, in one sentence with what to use; None where they can.

    It is None for other precisions too, unless a recipe contradicts them.

    The devices are those of TransformerEngine@d0067d0d `pytorch/quantization.py` and torchao@36027d82
    `docs/source/workflows/training.md`: fp8 takes compute capability 8.9 or an MI300, blocks of 128 take 9.0, MXFP8
    takes 10.0 and is not on 12.0 yet, NVFP4 takes 10.0.
    """
    if precision not in SCALED_PRECISIONS:
        return f"--fp8-recipe {recipe} is for --precision fp8 or fp4, not {precision}" if recipe else None
    library = code_base(code).scaled_products
    if library == "none":
        others = ", ".join(name for name in code_names() if code_base(name).scaled_products != "none")
        return f"--code {code} has no {precision} products; use --precision bf16, or --code {others}"
    chosen = recipe or usual_recipe(device, precision)
    if (chosen == "nvfp4") != (precision == "fp4"):
        fits = "--fp8-recipe nvfp4" if precision == "fp4" else "another recipe, or --precision fp4"
        return f"--precision {precision} does not go with --fp8-recipe {chosen}; use {fits}"
    if chosen not in RECIPES_OF[library]:
        return f"{library}, which --code {code} uses, has no {chosen} recipe; use {', '.join(RECIPES_OF[library])}"
    if code == "llm-foundry" and chosen != "tensorwise":
        return f"llm-foundry has no {chosen} recipe; use --fp8-recipe tensorwise, which its amp_fp8 is"
    return _why_no_units(device, precision, chosen)


def _why_no_units(device: Device, precision: Precision, recipe: Fp8Recipe) -> str | None:
    """Return what a device has no units for."""
    capability = capability_of(device)
    if device.architecture in ("cdna3", "cdna4") and recipe in ("tensorwise", "rowwise"):
        return None
    needed = {"tensorwise": (8, 9), "rowwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}[recipe]
    if capability >= needed and not (recipe == "mxfp8" and capability >= (12, 0)):
        return None
    if not capability >= (8, 9) and device.architecture not in ("cdna3", "cdna4"):
        return f"{device.name} has no units for {precision} products; use --precision bf16 or fp16"
    other = "--fp8-recipe tensorwise" if precision == "fp8" else "--precision fp8"
    return f"{device.name} has no {recipe} products; use {other}"
