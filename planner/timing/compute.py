"""Seconds of compute of one micro-batch on one rank, block by block of a stack and for the output head.

A pass over a block costs its weight products, its attention and its elementwise traffic, and never less than launching
its kernels. Derivations of the pass counts stand in docs/cost-model-time.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.timing.efficiency import GEMM_TRAFFIC, DeviceRates
from planner.timing.flops import (
    BACKWARD,
    Geometry,
    attention_flops,
    executed_attention_flops,
    head_tokens,
    head_width,
)
from planner.timing.stacks import Stack

LAYER_NORM_PASSES = 2.0
"""Reads and writes of the hidden state by one fused layer norm."""

RMS_NORM_PASSES = 9.0
"""The same for an RMS norm written in torch operations with an fp32 inside (transformers' modules)."""

RESIDUAL_PASSES = 3.0
"""One residual addition reads two tensors and writes one."""

DROPOUT_PASSES = 2.5
"""Read, write, and a mask of one byte."""

ACTIVATION_PASSES = 2.0
GATED_PASSES = 5.0
COMPOSITE_ACTIVATION_PASSES = 18.0
"""One kernel; activation and product; the eight kernels of `gelu_new`, a read and a write or more each."""

ROTARY_PASSES = 10.0
"""Rotating queries and keys: negate, concatenate, two products, one sum."""

EAGER_SCORE_BYTES = 20.0
"""Traffic of one attention score through product, scale, mask, fp32 softmax, cast and product without fusion."""

KERNELS_OUTSIDE_MATMULS = {"layernorm": 8, "rmsnorm": 26}
"""Kernels of a block besides its weight products: norms, residuals, activation, attention, rotation."""

LOSS_BYTES_PER_LOGIT = 30.0
"""Traffic of a logit through cast, shift, log-softmax and nll in fp32, forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Seconds of forward and backward of one block or head on one micro-batch, and of what recomputation repeats."""

    forward: float
    backward: float
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            recomputed=self.recomputed + other.recomputed,
        )

    def __mul__(self, factor: float) -> Passes:
        return Passes(
            forward=self.forward * factor, backward=self.backward * factor, recomputed=self.recomputed * factor
        )


def gemm_seconds(flops: float, moved_elements: float, rates: DeviceRates) -> float:
    """Weight products of `flops` operations whose three matrices hold `moved_elements`."""
    traffic = moved_elements * rates.element_bytes * GEMM_TRAFFIC / rates.memory_bytes_per_s
    return flops / rates.gemm_flops + traffic


def _elementwise_bytes(stack: Stack, rates: DeviceRates, tp: int) -> float:
    """Bytes per token that the forward of one block moves outside products; norms and residuals are not split by tp."""
    norm = RMS_NORM_PASSES if stack.root_mean_square_norm else LAYER_NORM_PASSES
    hidden = stack.norms * norm + 2 * RESIDUAL_PASSES + (2 * DROPOUT_PASSES if stack.dropout else 0)
    activation = GATED_PASSES if stack.gated else ACTIVATION_PASSES
    if stack.composite_activation:
        activation += COMPOSITE_ACTIVATION_PASSES - ACTIVATION_PASSES
    split = activation * stack.mlp_width
    if stack.rotary:
        split += ROTARY_PASSES * (stack.attention_width + stack.key_value_width)
    return (hidden * stack.hidden + split / tp) * rates.element_bytes


def _attention_seconds(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> float:
    """Forward of attention in one block on one tp rank."""
    tp = job.configuration.tp
    if job.configuration.attention != "eager":
        return executed_attention_flops(stack, shape) / tp / rates.attention_flops
    full = attention_flops(stack, shape)
    scores = full / (4.0 * stack.attention_width) * stack.heads if stack.attention_width else 0.0
    return (full / rates.gemm_flops + scores * EAGER_SCORE_BYTES / rates.memory_bytes_per_s) / tp


def block_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """One block of a stack on one micro-batch of one rank."""
    tp = job.configuration.tp
    matmuls = stack.matmuls
    tokens = shape.samples * stack.length(shape.sequence, shape.source)
    moved = matmuls.stored / tp + tokens * (matmuls.unsplit_width + matmuls.split_width / tp)
    products = gemm_seconds(2.0 * matmuls.active * tokens / tp, moved, rates)
    elementwise = tokens * _elementwise_bytes(stack, rates, tp) / rates.memory_bytes_per_s
    attention = _attention_seconds(stack, job, shape, rates)
    others = 0
    if stack.norms:
        others = KERNELS_OUTSIDE_MATMULS["rmsnorm" if stack.root_mean_square_norm else "layernorm"]
    launch = (matmuls.kernels + others) * rates.launch_seconds
    forward = max(products + elementwise + attention, launch)
    backward = max(BACKWARD * (products + elementwise) + ATTENTION_BACKWARD * attention, BACKWARD * launch)
    checkpointing = job.configuration.activation_checkpointing
    recomputed = {"none": 0.0, "full": forward, "selective": elementwise + attention}[checkpointing]
    return Passes(forward=forward, backward=backward, recomputed=recomputed)


ATTENTION_BACKWARD = 2.5
"""Fused attention's backward runs five products for the forward's two (FlashAttention-2, arXiv 2307.08691)."""


def head_passes(job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """The output projection and the loss on one micro-batch of one rank."""
    tp = job.configuration.tp
    tokens, width, hidden = head_tokens(job, shape), head_width(job), job.facts.hidden_size
    moved = (width * hidden + tokens * width) / tp + tokens * hidden
    product = gemm_seconds(2.0 * tokens * width * hidden / tp, moved, rates)
    loss = tokens * width / tp * LOSS_BYTES_PER_LOGIT / rates.memory_bytes_per_s
    return Passes(forward=product + loss / 2, backward=BACKWARD * product + loss / 2)
