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

USUAL_MATMULS = 7
"""Weight products of a dense gated block; those beyond are an expert's and cost the host a launch each."""

ATTENTION_BACKWARD = 3.0
"""Fused attention: backward over forward time. Five products for two, at 5/6 of the forward's rate (see docs)."""


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
    code = rates.code
    norm = code.rms_norm_passes if stack.root_mean_square_norm else code.layer_norm_passes
    hidden = stack.norms * norm + 2 * code.residual_passes + (2 * code.dropout_passes if stack.dropout else 0)
    activation = code.composite_activation_passes if stack.composite_activation else code.activation_passes
    split = (code.gated_passes if stack.gated else activation) * stack.mlp_width
    if stack.rotary:
        split += code.rotary_passes * (stack.attention_width + stack.key_value_width)
    return (hidden * stack.hidden + split / tp) * rates.element_bytes


def _attention_seconds(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> float:
    """Forward of attention in one block on one tp rank."""
    tp = job.configuration.tp
    full = attention_flops(stack, shape)
    if not job.eager_attention:
        executed = executed_attention_flops(stack, shape) if rates.code.skips_masked else full
        return executed / tp / rates.attention_flops
    scores = full / (4.0 * stack.attention_width) * stack.heads if stack.attention_width else 0.0
    return (full / rates.gemm_flops + scores * rates.code.score_bytes / rates.memory_bytes_per_s) / tp


def block_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """One block of a stack on one micro-batch of one rank."""
    tp = job.configuration.tp
    matmuls = stack.matmuls
    tokens = shape.samples * stack.length(shape.sequence, shape.source)
    moved = matmuls.stored / tp + tokens * (matmuls.unsplit_width + matmuls.split_width / tp)
    products = gemm_seconds(2.0 * matmuls.active * tokens / tp, moved, rates)
    elementwise = tokens * _elementwise_bytes(stack, rates, tp) / rates.memory_bytes_per_s
    attention = _attention_seconds(stack, job, shape, rates)
    host = _host_seconds(stack, rates)
    forward = max(products + elementwise + attention, host)
    backward = max(BACKWARD * (products + elementwise) + ATTENTION_BACKWARD * attention, BACKWARD * host)
    checkpointing = job.configuration.activation_checkpointing
    selective = elementwise + rates.code.selective_products * products
    recomputed = {"none": 0.0, "full": forward, "selective": selective}[checkpointing]
    return Passes(forward=forward, backward=backward, recomputed=recomputed)


def _host_seconds(stack: Stack, rates: DeviceRates) -> float:
    """Launching the forward of one block: nothing on the device can be faster than its host."""
    if not stack.norms:
        return stack.matmuls.kernels * rates.code.kernel_host_seconds
    experts = max(0, stack.matmuls.kernels - USUAL_MATMULS) * rates.code.kernel_host_seconds
    return rates.code.block_host_seconds + experts


def head_passes(job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """The output projection and the loss on one micro-batch of one rank."""
    tp = job.configuration.tp
    tokens, width, hidden = head_tokens(job, shape), head_width(job), job.facts.hidden_size
    moved = (width * hidden + tokens * width) / tp + tokens * hidden
    product = gemm_seconds(2.0 * tokens * width * hidden / tp, moved, rates)
    loss = tokens * width / tp * rates.code.loss_bytes / rates.memory_bytes_per_s
    return Passes(forward=product + loss / 2, backward=BACKWARD * product + loss / 2)
