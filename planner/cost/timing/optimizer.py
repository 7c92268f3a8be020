"""Seconds of the optimizer step."""

from __future__ import annotations

from functools import lru_cache

from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.layout import Layout
from planner.models.facts import ParameterCounts
from planner.types.cluster import Curve
from planner.types.job import Job
from planner.vocabulary import MIXED_PRECISIONS

STEP_BYTES = {
    "adamw": 80,
    "adamw-fused": 28,
    "adamw-forloop": 80,
    "adamw-8bit": 16,
    "sgd": 12,
    "adafactor": 48,
    "lion": 40,
    "adamw-8bit-paged": 16,
    "adamw-4bit": 14,
    "adamw-fp8": 16,
    "muon": 52,
}
"""Bytes read and written per fp32 parameter by one step, kernel by kernel: docs/explanation/cost-model-time.md."""

CLIPPING_BYTES = 12
"""Gradient norm (one read of 4 bytes) and scaling (a read and a write)."""

MASTER_COPY_BYTES = 12
"""ZeRO in 16 bit: gradient to fp32 (2 + 4) and master copy to parameter (4 + 2)."""

FORLOOP_KERNELS = 12
TENSORS_PER_BLOCK = 12
"""Kernels of one for-loop AdamW update; parameter tensors of a usual block (4 + 2 or 3 products, norms, biases)."""


def optimizer_seconds(job: Job, where: Layout, rates: DeviceRates) -> float:
    """Return the step of this rank's states on the device. On a CPU a measured AdamW counts before bytes moved."""
    configuration, measured = job.configuration, rates.measured
    curve = measured.cpu_optimizer_fused if configuration.optimizer == "adamw-fused" else measured.cpu_optimizer
    if rates.serial and curve is not None and configuration.optimizer.startswith("adamw"):
        return _measured_step(where, curve, flat=configuration.zero_stage > 0) / rates.factors.cpu_optimizer
    scale = 0.5 if configuration.precision == "bf16-pure" else 1.0
    size = (STEP_BYTES[configuration.optimizer] + CLIPPING_BYTES) * scale
    if configuration.zero_stage and configuration.precision in MIXED_PRECISIONS:
        size += MASTER_COPY_BYTES
    seconds = where.owned * size / rates.memory_bytes_per_s
    if job.workload.ema:
        seconds += where.owned * EMA_BYTES * scale / rates.memory_bytes_per_s
    if configuration.optimizer == "muon":
        seconds += newton_schulz_flops(job.counts) / where.shards / rates.gemm_flops
    if configuration.optimizer == "adamw-forloop":
        launches = FORLOOP_KERNELS * TENSORS_PER_BLOCK * where.layers
        seconds = max(seconds, launches * rates.code.kernel_host_seconds)
    return seconds


EMA_BYTES = 12
"""An average is read, moved towards the parameter, which is read too, and written (`torch.optim.swa_utils`)."""
NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's (torch 2.13 `optim/_muon.py`)."""


@lru_cache(maxsize=64)
def newton_schulz_flops(counts: ParameterCounts) -> float:
    """Return operations of Muon's step over the matrices of all blocks.

    In each iteration a matrix [m, n], m the smaller side, by itself transposed, that square by itself, and the two
    multiplied.
    """
    flops = 0.0
    for block in counts.trained.blocks:
        for shape in block.shapes:
            if len(shape) == 2:
                small, large = sorted(shape)
                flops += block.repeats * NEWTON_SCHULZ_STEPS * (4.0 * small**2 * large + 2.0 * small**3)
    return flops


def _measured_step(where: Layout, step: Curve, *, flat: bool) -> float:
    """AdamW as it was measured on a CPU, whose caches make small tensors cheaper per parameter.

    ZeRO updates one flat tensor, the others each parameter by itself: a block's matrices, the embedding, the head.
    """
    if flat:
        return step.seconds(where.owned)
    tensors = where.layers * where.products
    seconds = tensors * step.seconds(where.block / where.products / where.shards)
    ends = (where.embedding, where.root - where.embedding)
    return seconds + sum(step.seconds(parameters / where.shards) for parameters in ends if parameters > 0)
