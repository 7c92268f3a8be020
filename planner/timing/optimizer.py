"""Seconds of the optimizer step and of what each micro-batch does to parameters and gradients as such."""

from __future__ import annotations

from planner.job import Job
from planner.timing.efficiency import DeviceRates
from planner.timing.layout import Layout
from planner.vocabulary import FSDP_STRATEGIES

STEP_BYTES = {
    "adamw": 80,
    "adamw-fused": 28,
    "adamw-forloop": 80,
    "adamw-8bit": 16,
    "sgd": 12,
    "adafactor": 48,
    "lion": 40,
}
"""Bytes read and written per fp32 parameter by one step, kernel by kernel as docs/cost-model-time.md counts them."""

CLIPPING_BYTES = 12
"""Gradient norm (one read of 4 bytes) and scaling (a read and a write)."""

MASTER_COPY_BYTES = 12
"""ZeRO in 16 bit: gradient to fp32 (2 + 4) and master copy to parameter (4 + 2)."""

FORLOOP_KERNELS = 12
TENSORS_PER_BLOCK = 12
"""Kernels of one for-loop AdamW update; parameter tensors of a usual block (4 + 2 or 3 products, norms, biases)."""

AUTOCAST_BYTES = 12
"""Autocast casts fp32 weights for the forward (4 + 2) and 16-bit weight gradients back (2 + 4) in every micro-batch."""

BUCKET_COPY_BYTES = 16
"""DDP copies every fp32 gradient into its bucket and back (`gradient_as_bucket_view` is off by default)."""

GATHER_COPY_BYTES = 14
"""A gathered unit is copied out twice (2 + 2 each, forward and backward), its gradient cast for reduction (2 + 4)."""


def optimizer_seconds(job: Job, where: Layout, rates: DeviceRates) -> float:
    """The step on the device: states this rank owns. On a CPU a measured AdamW counts before the bytes it moves."""
    configuration, measured = job.configuration, rates.measured
    curve = measured.cpu_optimizer_fused if configuration.optimizer == "adamw-fused" else measured.cpu_optimizer
    if rates.serial and curve is not None and configuration.optimizer.startswith("adamw"):
        return curve.seconds(where.owned) / rates.factors.cpu_optimizer
    scale = 0.5 if configuration.precision == "bf16-pure" else 1.0
    size = (STEP_BYTES[configuration.optimizer] + CLIPPING_BYTES) * scale
    if configuration.zero_stage and configuration.precision in ("bf16", "fp16"):
        size += MASTER_COPY_BYTES
    seconds = where.owned * size / rates.memory_bytes_per_s
    if configuration.optimizer == "adamw-forloop":
        launches = FORLOOP_KERNELS * TENSORS_PER_BLOCK * where.layers
        seconds = max(seconds, launches * rates.code.kernel_host_seconds)
    return seconds


def parameter_traffic_seconds(job: Job, where: Layout, rates: DeviceRates) -> float:
    """Casting weights and adding up gradients over the whole step, on the device."""
    configuration = job.configuration
    steps = configuration.gradient_accumulation_steps
    sharded_gradients = configuration.zero_stage in (2, 3)
    kept = where.owned if sharded_gradients else where.parameters
    accumulated = (steps - 1) * 3 * where.gradient_bytes * kept
    mixed = configuration.precision in ("bf16", "fp16")
    if configuration.strategy in FSDP_STRATEGIES or configuration.strategy == "zero3":
        copied = GATHER_COPY_BYTES if where.shards > 1 else 0
    else:
        copied = AUTOCAST_BYTES if mixed and not configuration.zero_stage else 0
    bucketed = BUCKET_COPY_BYTES if configuration.strategy == "ddp" and where.replica_group.size > 1 else 0
    return (accumulated + (steps * copied + bucketed) * where.parameters) / rates.memory_bytes_per_s
