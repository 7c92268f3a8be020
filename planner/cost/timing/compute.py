"""Seconds of compute of one micro-batch on one rank, block by block of a stack and for the output head.

A pass over a block costs its weight products, its attention and its elementwise traffic, and never less than launching
its kernels. Derivations of the pass counts stand in docs/explanation/cost-model-time.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.precision import ScaledProducts
from planner.cost.timing.efficiency import ATTENTION_BACKWARD, BACKWARD, DeviceRates, Waste, block_waste
from planner.cost.timing.flops import (
    Geometry,
    attention_flops,
    executed_attention_flops,
    head_tokens,
    head_weights,
    head_width,
)
from planner.cost.timing.stacks import USUAL_MATMULS, Stack
from planner.types.job import Job


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


ATTENTION_PRODUCTS = 2
"""Of queries with keys, and of scores with values."""

NOTHING = Passes(forward=0.0, backward=0.0)

EXPONENTIAL_PASSES = 2.0
SOFTMAX_BYTES = 6.0
LOG_SOFTMAX_BYTES = 16.0
"""Of an activation's passes, and of the bytes of a score and of a logit, those in kernels that take exponentials."""

WRITTEN_OUT_BYTES = 60.0
"""Of a score in fp32 where torch writes fused attention out on a CPU: product 4, mask 8, softmax 8, whether a row is
masked whole 5 + 1 + 13, dropout 12, copies 5, product 4; 3.2 nanoseconds a score were measured on two cores."""

FP32_SCORE_BYTES = 32.0
"""Of a score of eager attention in fp32: product 4, scale 8, mask 8, softmax 8, product 4."""

ALIGNED_ELEMENTS = 8
"""Tensor cores take 16-bit products whose inner width is a multiple of this (16 bytes); others run without them."""


def _elementwise_seconds(stack: Stack, tokens: float, rates: DeviceRates, tp: int) -> float:
    """What the forward of one block does outside products; norms and residuals are not split by tp."""
    code = rates.code
    norm = code.rms_norm_passes if stack.root_mean_square_norm else code.layer_norm_passes
    masked = 2 * code.dropout_passes if stack.dropout and rates.measured.dropout is None else 0
    hidden = stack.norms * norm + 2 * code.residual_passes + masked
    activation = code.composite_activation_passes if stack.composite_activation else code.activation_passes
    activation = code.gated_passes if stack.gated else activation
    rotated = stack.attention_width + stack.key_value_width if stack.rotary else 0
    inner = stack.mlp_width / tp
    plain = hidden * stack.hidden + code.rotary_passes * rotated / tp + code.dispatch_passes * stack.dispatched
    beside = activation - EXPONENTIAL_PASSES
    element = tokens * rates.element_bytes
    if stack.launches:
        moved = tokens * stack.moved * (rates.element_bytes / 4 if stack.moved_in_fp32 else 1)
        return rates.elementwise(moved, moved / stack.launches)
    return (
        rates.elementwise(plain * element, 2 * stack.hidden * element)
        + rates.elementwise(beside * inner * element, 2 * inner * element)
        + rates.exponentials(EXPONENTIAL_PASSES * inner * element, 2 * inner * element)
    )


def _attention_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """Attention in one block on one tp rank."""
    tp = job.configuration.tp
    full = attention_flops(stack, shape) / tp
    if not full:
        return NOTHING
    # torch's fused attention on a CPU knows no dropout: it is written out instead.
    written_out = rates.serial and stack.attention_dropout
    if not job.eager_attention and not written_out:
        executed = executed_attention_flops(stack, shape) / tp if rates.code.skips_masked else full
        return Passes(forward=rates.attention(executed), backward=rates.attention_backward(executed))
    aligned = stack.attention_width // stack.heads % ALIGNED_ELEMENTS == 0 or rates.element_bytes > 2
    products = full / (rates.gemm_flops if aligned else rates.plain_flops)
    if rates.serial:
        products = rates.products(full, 0.0, ATTENTION_PRODUCTS)
    scores = full / (4.0 * stack.attention_width) * stack.heads
    kernel = 2 * rates.element_bytes * scores
    moved = (
        WRITTEN_OUT_BYTES if written_out else FP32_SCORE_BYTES if rates.element_bytes > 2 else rates.code.score_bytes
    )
    forward = products + rates.elementwise((moved - SOFTMAX_BYTES) * scores, kernel)
    forward += rates.exponentials(SOFTMAX_BYTES * scores, kernel)
    drawn = rates.random(scores) if written_out else 0.0
    return Passes(forward=forward + drawn, backward=ATTENTION_BACKWARD * forward)


def block_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """One block of a stack on one micro-batch of one rank."""
    tp = job.configuration.tp
    matmuls = stack.matmuls
    tokens = shape.samples * stack.length(shape.sequence, shape.source)
    moved = matmuls.stored / tp + tokens * (matmuls.unsplit_width + matmuls.split_width / tp)
    work = 2.0 * matmuls.active * tokens / tp, moved, matmuls.kernels
    waste = block_waste(stack, tokens, tp, rates.multiprocessors)
    products, products_backward = _product_passes(stack, tokens, tp, work, waste, rates)
    elementwise = _elementwise_seconds(stack, tokens, rates, tp)
    attention = _attention_passes(stack, job, shape, rates)
    host = _host_seconds(stack, rates)
    drawn = 2 * rates.random(tokens * stack.hidden) if stack.dropout else 0.0
    forward = _with_host(products + elementwise + attention.forward + drawn, host, rates)
    device = products_backward + BACKWARD * elementwise + attention.backward
    backward = _with_host(device, BACKWARD * host, rates)
    skipped = products * stack.last_product / matmuls.active if rates.code.stops_early else 0.0
    again = _with_host(products - skipped + elementwise + attention.forward + drawn, host, rates)
    checkpointing = job.configuration.activation_checkpointing
    selective = elementwise + rates.code.selective_products * products
    recomputed = {"none": 0.0, "full": again, "selective": selective}[checkpointing]
    return Passes(forward=forward, backward=backward, recomputed=recomputed)


def _product_passes(
    stack: Stack, tokens: float, tp: int, work: tuple[float, float, float], waste: Waste, rates: DeviceRates
) -> tuple[float, float]:
    """Seconds of a block's weight products in the forward and in the backward."""
    forward, backward = rates.products(*work, waste.forward), rates.products_backward(*work, waste.backward)
    scaled = rates.scaled
    if scaled is None or not stack.norms:
        return forward, backward
    share = scaled.blocks * _converted(stack, scaled)
    matmuls = stack.matmuls
    widths = (matmuls.unsplit_width + matmuls.split_width / tp) / 2
    moved = scaled.operand * (matmuls.stored / tp + tokens * widths) + 2.0 * tokens * widths
    inputs, outputs = _cast_widths(stack, tp, tp if scaled.casts_shards else 1)
    weights = scaled.weight_casts / 2 * matmuls.stored / tp
    casts = scaled.activation_casts * tokens * inputs, scaled.activation_casts * tokens * outputs
    narrow = rates.scaled_products(work[0], moved, waste.forward)
    narrow_backward = BACKWARD * rates.scaled_products(work[0], moved, waste.backward)
    narrow += (casts[0] + weights) / rates.memory_bytes_per_s
    narrow_backward += (casts[1] + weights) / rates.memory_bytes_per_s
    return (1 - share) * forward + share * narrow, (1 - share) * backward + share * narrow_backward


def _converted(stack: Stack, scaled: ScaledProducts) -> float:
    """Share of a block's operations in layers that are converted: all, unless attention's are too small to gain."""
    hidden, attention, keys = stack.hidden, stack.attention_width, stack.key_value_width
    if not (hidden and stack.matmuls.active):
        return 1.0
    layers = ((attention, hidden), (keys, hidden), (keys, hidden), (hidden, attention))
    left: float = sum(outputs * inputs for outputs, inputs in layers if not scaled.takes(outputs, inputs))
    if not stack.dispatched:
        width = stack.mlp_width
        left += (2 if stack.gated else 1) * hidden * width * (not scaled.takes(width, hidden))
        left += hidden * width * (not scaled.takes(hidden, width))
    return max(0.0, 1 - left / stack.matmuls.active)


def _cast_widths(stack: Stack, tp: int, parts: int) -> tuple[float, float]:
    """Elements per token of a block's linear layers' inputs, those that several read counted once, and of outputs.

    Of what is as wide as the model a rank casts one of `parts`."""
    if not stack.hidden:
        width = (stack.matmuls.unsplit_width + stack.matmuls.split_width / tp) / 2
        return width, width
    hidden, routed = stack.hidden / parts, (stack.dispatched or stack.hidden) / parts
    attention, width = stack.attention_width / tp, stack.mlp_width / tp
    outputs = attention + 2 * stack.key_value_width / tp + hidden
    return hidden + attention + routed + width, outputs + (2 if stack.gated else 1) * width + routed


def _with_host(device: float, host: float, rates: DeviceRates) -> float:
    """A device runs beside its host and is never faster; a CPU is both, one after the other."""
    return device + host if rates.serial else max(device, host)


def _host_seconds(stack: Stack, rates: DeviceRates) -> float:
    """Launching the forward of one block."""
    if stack.launches:
        return stack.launches * rates.code.kernel_host_seconds
    if not stack.norms:
        return stack.matmuls.kernels * rates.code.kernel_host_seconds
    experts = max(0, stack.matmuls.kernels - USUAL_MATMULS) + (rates.code.dispatch_kernels if stack.dispatched else 0)
    return rates.code.block_host_seconds + experts * rates.code.kernel_host_seconds


def head_passes(job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """The output projection and the loss on one micro-batch of one rank."""
    tp = job.configuration.tp
    tokens, width, hidden = head_tokens(job, shape), head_width(job), job.facts.hidden_size
    if not tokens:
        return NOTHING
    weights = head_weights(job)
    moved = (weights + tokens * width) / tp + tokens * hidden
    work = 2.0 * tokens * weights / tp, moved, 1
    logits = tokens * width / tp
    kernel = 2 * rates.element_bytes * logits
    loss = rates.elementwise((rates.code.loss_bytes - LOG_SOFTMAX_BYTES) * logits, kernel)
    loss += rates.exponentials(LOG_SOFTMAX_BYTES * logits, kernel)
    return Passes(forward=rates.products(*work) + loss / 2, backward=rates.products_backward(*work) + loss / 2)
