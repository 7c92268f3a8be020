"""Bytes per parameter of each training recipe: what weights, gradients and optimizer states cost before sharding.

Sources: ZeRO (Rajbhandari et al. 2020, section 3) for the mixed-precision recipe 2 + 2 + K; torch's autocast and AMP
notes for weights that stay fp32; DeepSpeed 0.19 `stage_1_and_2.py` and `stage3.py`, which keep a copy of partitions
in every dtype: bf16 for `bf16-pure`, fp32 for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES, ZERO_STAGES, Compression, LoadDtype

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
# per block of 256 values for each; adafactor's factored moments are counted from the matrices instead (see states.py).
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Bytes per parameter, and the widths that activations and collectives use.

    `weight`, `gradient`: of the tensors that live between steps; `master`: of a copy the optimizer keeps;
    `state`: optimizer moments; `compute`: of the dtype matrices multiply in; `residual`: of the residual stream between
    blocks; `gather` and `reduce`: of parameters and gradients on the wire. `autocast` marks fp32 weights cast on the
    fly.

    `frozen`: of weights that are not trained, `quantised` of those of linear layers in blocks where they are loaded
    narrower still; None where they are as the trained ones.
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
    frozen: float | None = None
    quantised: float | None = None

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
        return self.quantised is not None


NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""bitsandbytes' nf4 with double quantisation: half a byte, and for 64 values a scale of one byte, of which 256 share
an fp32 (QLoRA, arXiv 2305.14314, section 3; bitsandbytes `functional.quantize_4bit`, compress_statistics)."""
INT8_LOADED_BYTES = 1.0
"""bitsandbytes' `Linear8bitLt` keeps a byte per weight and an fp32 per row, which is not counted (recalled)."""
LOADED_BYTES: dict[LoadDtype, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": INT8_LOADED_BYTES, "nf4": NF4_BYTES}


def recipe_of(job: Job) -> Recipe:
    """The recipe that a backend follows for a precision (docs/explanation/strategies.md, "What a precision means")."""
    configuration, workload = job.configuration, job.workload
    recipe = _native_recipe(configuration) if configuration.backend == "native" else _recipe(configuration)
    narrow = configuration.gradient_compression in ("fp16", "bf16") and configuration.strategy in FSDP_STRATEGIES
    if narrow and configuration.backend != "native":
        recipe = replace(recipe, reduce=2)
    loaded = load_dtype_of(workload)
    return recipe if loaded is None else _loaded(recipe, loaded, trains_all=job.counts.trains_all)


def load_dtype_of(workload: Workload) -> LoadDtype | None:
    """What the weights are loaded as: what was asked for; beside adapters nf4 for QLoRA and else what is computed in;
    None for what the precision says."""
    if workload.load_dtype is not None or workload.method == "full":
        return workload.load_dtype
    if workload.method == "qlora":
        return "nf4"
    return "fp32" if workload.precision == "fp32" else "fp16" if workload.precision == "fp16" else "bf16"


def _loaded(recipe: Recipe, loaded: LoadDtype, *, trains_all: bool) -> Recipe:
    """A recipe where weights are loaded in a dtype of their own. Those that are trained keep it under autocast and
    FSDP, with gradients and moments as wide; frozen ones do everywhere, and what a quantised model leaves as it is has
    16 bits, or those of compute."""
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


def _recipe(configuration: Configuration) -> Recipe:
    state = STATE_BYTES[configuration.optimizer]
    is_zero = configuration.strategy in ZERO_STAGES
    precision = configuration.precision
    if precision == "bf16-pure":
        narrow_state = state if configuration.optimizer == "adamw-8bit" else state / 2
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


def _native_recipe(configuration: Configuration) -> Recipe:
    """Our own ZeRO's (`strategies/backends/zero/settings.py`): masters only where weights are 16-bit and states are
    not, and gradients that wait for several micro-batches in fp32. Stage 3's sharded weights are the masters, cast as
    they are all-gathered."""
    state, precision = STATE_BYTES[configuration.optimizer], configuration.precision
    width = 4 if precision == "fp32" else 2
    mixed = precision in ("bf16", "fp16")
    narrow = precision == "bf16-pure" and configuration.optimizer != "adamw-8bit"
    is_cut = configuration.zero_stage == 3 and configuration.dp_shard > 1 and configuration.offload == "none"
    return Recipe(
        weight=4 if mixed and is_cut else width,
        gradient=4 if mixed and configuration.gradient_accumulation_steps > 1 else width,
        master=4 if mixed and not is_cut else 0,
        state=state / 2 if narrow else state,
        compute=width,
        residual=width,
        gather=width,
        reduce=width,
        autocast=False,
    )
