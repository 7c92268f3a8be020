"""Seconds of compute of one micro-batch on one rank, block by block of a stack and for the output head.

A pass over a block costs its weight products, its attention and its elementwise traffic, and never less than launching
its kernels. Derivations of the pass counts stand in docs/explanation/cost-model-time.md.
"""

from __future__ import annotations

from dataclasses import replace

from hardware_db.records import dataclass
from planner.cost.memory.activations.adapters import DEQUANTISED_BYTES
from planner.cost.precision import Recipe, ScaledProducts
from planner.cost.timing.efficiency import BACKWARD, DeviceRates, Waste, block_waste
from planner.cost.timing.flops import (
    ALL_TRAINED,
    Geometry,
    adapters_of,
    attention_flops,
    executed_attention_flops,
    head_tokens,
    head_weights,
    head_width,
    recomputed_share,
    trained_share,
)
from planner.cost.timing.optimizer import TENSORS_PER_BLOCK
from planner.cost.timing.stacks import USUAL_MATMULS, Matmuls, Stack, recomputed_products
from planner.types.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Seconds of forward and backward of one block or head on one micro-batch, and of what recomputation repeats.

    Of the forward `attention`'s, of the backward those of the gradients of `weights`, which nothing waits for.
    """

    forward: float
    backward: float
    recomputed: float = 0.0
    attention: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            recomputed=self.recomputed + other.recomputed,
            attention=self.attention + other.attention,
            weights=self.weights + other.weights,
        )

    def __mul__(self, factor: float) -> Passes:
        return Passes(
            forward=self.forward * factor,
            backward=self.backward * factor,
            recomputed=self.recomputed * factor,
            attention=self.attention * factor,
            weights=self.weights * factor,
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

FP32_SCORE_BACKWARD_BYTES = 36.0
"""Of the same in the backward: products around the probabilities 8, softmax 12, scale 8, products of the scores 8."""

WRITTEN_OUT_BACKWARD_BYTES = 40.0
"""Of the same in the backward: products 8, dropout 12, softmax 12, products 8."""

ALIGNED_ELEMENTS = 8
"""Tensor cores take 16-bit products whose inner width is a multiple of this (16 bytes); others run without them."""

MISALIGNED_SHARE = 0.35
"""Rate of products with a vocabulary that is no multiple of ALIGNED_ELEMENTS, over that of an aligned one: 84 of 240
TFLOP/s in vTrain's runs of GPT on one tensor-parallel rank (50,257 tokens, A100). GPT-2 is said to gain 30 % where its
vocabulary is made 50,304 (zzhhjjj/LLaMA notes/README.md)."""


BLOCK_COLLECTIVES = 2
"""Of tensor parallelism in a block's forward (arXiv 1909.08053), and as many in its backward."""

COLLECTIVE_KERNELS = 5
"""What a collective costs its host, in kernels: torch's process group records events and waits on streams around it."""

BLOCK_KERNELS, HEAD_KERNELS = 25, 16
"""Launched by the forward of a block, and of what is around the blocks: embeddings and dropout 4, mask and positions 3,
norm and projection 2, cast, shift and loss 7."""


def _elementwise_seconds(stack: Stack, tokens: float, rates: DeviceRates, tp: int, is_split: bool) -> float:
    """Return what the forward of one block does outside products.

    tp splits norms and residuals only where sequence parallelism splits the tokens between products.
    """
    code = rates.code
    norm = code.rms_norm_passes if stack.root_mean_square_norm else code.layer_norm_passes
    masked = 2 * code.dropout_passes if stack.dropout and rates.measured.dropout is None else 0
    hidden = stack.norms * norm + 2 * code.residual_passes + masked
    activation = code.composite_activation_passes if stack.composite_activation else code.activation_passes
    activation = code.gated_passes if stack.gated else activation
    rotated = stack.attention_width + stack.key_value_width if stack.rotary else 0
    inner = stack.mlp_width / tp
    stream = hidden * stack.hidden + code.dispatch_passes * stack.dispatched
    plain = (stream / tp if is_split else stream) + code.rotary_passes * rotated / tp
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


def _recomputed_elementwise_seconds(stack: Stack, job: Job, tokens: float, rates: DeviceRates) -> float:
    """Return what recomputed modules of a block take outside products: norms, activations, rotation."""
    chosen, code, element = job.configuration, rates.code, tokens * rates.element_bytes
    norm = code.rms_norm_passes if stack.root_mean_square_norm else code.layer_norm_passes
    split = chosen.tp if chosen.sequence_parallel else 1
    seconds = 0.0
    if "layernorm" in chosen.recomputed:
        seconds += rates.elementwise(stack.norms * norm * stack.hidden / split * element, 2 * stack.hidden * element)
    if {"moe_act", "shared_experts", "mlp", "moe"} & {*chosen.recomputed}:
        passes = code.gated_passes if stack.gated else code.activation_passes
        inner = stack.mlp_width / chosen.tp
        seconds += rates.elementwise(passes * inner * element, 2 * inner * element)
    if "mla_up_proj" in chosen.recomputed:
        rotated = (stack.attention_width + stack.key_value_width) / chosen.tp
        seconds += rates.elementwise(code.rotary_passes * rotated * element, 2 * rotated * element)
    return seconds


def _attention_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """Attention in one block on one rank: of its heads, and of its part of the queries, with all keys."""
    tp = job.configuration.tp * job.configuration.cp
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
    moved, moved_back = rates.code.score_bytes, rates.code.score_backward_bytes
    if rates.element_bytes > 2:
        moved, moved_back = FP32_SCORE_BYTES, FP32_SCORE_BACKWARD_BYTES
    if written_out:
        moved, moved_back = WRITTEN_OUT_BYTES, WRITTEN_OUT_BACKWARD_BYTES
    forward = products + rates.elementwise((moved - SOFTMAX_BYTES) * scores, kernel)
    forward += rates.exponentials(SOFTMAX_BYTES * scores, kernel)
    drawn = rates.random(scores) if written_out else 0.0
    backward = BACKWARD * products + rates.elementwise(moved_back * scores, kernel)
    return Passes(forward=forward + drawn, backward=backward)


def block_passes(stack: Stack, job: Job, shape: Geometry, rates: DeviceRates, frozen: Recipe | None) -> Passes:
    """One block of a stack on one micro-batch of one rank; `frozen` is the job's recipe where something is frozen."""
    tp = job.configuration.tp
    matmuls, ep = _on_rank(stack, job), job.configuration.ep
    tokens = shape.samples * stack.length(shape.sequence, shape.source) / job.configuration.cp
    moved = matmuls.stored / max(tp, ep if stack.dispatched else 1)
    moved += tokens * (matmuls.unsplit_width + matmuls.split_width / tp)
    work = 2.0 * matmuls.active * tokens / tp, moved, matmuls.kernels
    waste = block_waste(stack, tokens, tp, rates.multiprocessors)
    products, products_backward = _product_passes(stack, tokens=tokens, tp=tp, work=work, waste=waste, rates=rates)
    elementwise = _elementwise_seconds(stack, tokens, rates, tp, job.configuration.sequence_parallel)
    attention = _attention_passes(stack, job, shape, rates)
    host = _host_seconds(stack, rates, tp)
    hooks = _hook_seconds(stack, job)
    drawn = 2 * rates.random(tokens * stack.hidden) if stack.dropout else 0.0
    forward = _with_host(products + elementwise + attention.forward + drawn, host + hooks, rates)
    device = products_backward + BACKWARD * elementwise + attention.backward
    share = trained_share(job.counts)
    if share is not ALL_TRAINED:
        beside = _adapter_passes(job, frozen, tokens, rates) if stack.norms and frozen is not None else NOTHING
        device -= products_backward * (1 - (share.passed + share.weights) / 2)
        device += beside.backward - (1 - share.passed) * (BACKWARD * elementwise + attention.backward)
        elementwise += beside.forward
        host += beside.recomputed if stack.norms else 0.0
        forward = _with_host(products + elementwise + attention.forward + drawn, host + hooks, rates)
    backward = _with_host(device, (BACKWARD * host + hooks) * share.passed, rates)
    skipped = products * stack.last_product / matmuls.active if rates.code.stops_early else 0.0
    again = _with_host(products - skipped + elementwise + attention.forward + drawn, host + hooks, rates)
    checkpointing = job.configuration.activation_checkpointing
    selective = elementwise + rates.code.selective_products * products
    if job.configuration.recomputed:
        selective = products * recomputed_products(job.facts, job.configuration.recomputed) / matmuls.active
        selective += _recomputed_elementwise_seconds(stack, job, tokens, rates)
        selective += attention.forward if "core_attn" in job.configuration.recomputed else 0.0
    recomputed = selective if checkpointing == "selective" else recomputed_share(job) * again
    forward *= 1 + job.extra_forwards
    return Passes(
        forward=forward,
        backward=backward,
        recomputed=recomputed,
        attention=attention.forward,
        weights=products_backward / 2 * share.weights,
    )


def _on_rank(stack: Stack, job: Job) -> Matmuls:
    """Return a block's products on the busiest rank, which gets more tokens than the mean where experts are spread."""
    facts, matmuls = job.facts, stack.matmuls
    if job.configuration.ep == 1 or not stack.dispatched:
        return matmuls
    width = facts.moe_intermediate_size or facts.intermediate_size
    routed = (3 if facts.gated_mlp else 2) * facts.hidden_size * width * facts.experts_per_token
    share = 1 - facts.first_k_dense / facts.num_layers
    return replace(matmuls, active=matmuls.active + (job.workload.expert_imbalance - 1) * routed * share)


ADAPTER_KERNELS = 7
"""Casts or dequantisation, two products, scaling and sum of an adapter's forward (PEFT `lora/layer.py`, `bnb.py`)."""


def _adapter_passes(job: Job, recipe: Recipe, tokens: float, rates: DeviceRates) -> Passes:
    """Return the passes of an average block's adapters; `recomputed` is the host's time to launch them.

    They are products of rank width, which move much more than they compute, casts of inputs and their gradients where
    adapters are fp32 under autocast, and what is made of frozen matrices.
    """
    forward, backward, launched = 0.0, 0.0, 0.0
    widened = recipe.autocast and not recipe.dequantises
    width = rates.element_bytes
    for adapter, often in adapters_of(job.counts):
        elements = adapter.rank * (adapter.inputs + adapter.outputs)
        work = 2.0 * elements * tokens, tokens * (adapter.inputs + adapter.outputs + 2 * adapter.rank), 2
        read, written = tokens * adapter.inputs * width, tokens * adapter.outputs * width
        # Casts to fp32 and back (3 + 3), scaling (2), sum (3), and for a quantised matrix's sake a copy (2).
        beside = (6 if widened else 0) * read + (7 if recipe.dequantises else 5) * written
        behind = (9 if widened else 3) * read + 2 * written
        matrix = adapter.inputs * adapter.outputs
        decomposed = DORA_BYTES * matrix if adapter.magnitude else 0.0
        forward += often * (rates.products(*work) + rates.elementwise(beside + decomposed, max(read, written)))
        backward += often * (rates.products_backward(*work) + rates.elementwise(behind, max(read, written)))
        launched += often * ADAPTER_KERNELS * rates.code.kernel_host_seconds
    if recipe.quantised is not None:
        blocks = max(sum(block.repeats for block in job.counts.blocks), 1)
        size = (recipe.quantised + DEQUANTISED_BYTES) * job.counts.held.in_blocks / blocks
        forward += rates.elementwise(size, size)
        backward += rates.elementwise(size, size)
    return Passes(forward=forward, backward=backward, recomputed=launched)


DORA_BYTES = 30.0
"""Per element of a decomposed matrix in a forward: the adapters' product made (4) and cast (6), the frozen matrix cast
(6), their scaled sum (4 + 6) and its norm (4), PEFT's `lora/dora.py`."""


def _product_passes(
    stack: Stack, *, tokens: float, tp: int, work: tuple[float, float, float], waste: Waste, rates: DeviceRates
) -> tuple[float, float]:
    """Seconds of a block's weight products in the forward and in the backward."""
    forward, backward = rates.products(*work, waste.forward), rates.products_backward(*work, waste.backward)
    scaled = rates.scaled
    if scaled is None or not stack.norms:
        return forward, backward
    share = scaled.blocks * _converted_share(stack, scaled)
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


def _converted_share(stack: Stack, scaled: ScaledProducts) -> float:
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
    """Return elements per token of the inputs of a block's linear layers, shared ones counted once, and of outputs.

    Of what is as wide as the model a rank casts one of `parts`.
    """
    if not stack.hidden:
        width = (stack.matmuls.unsplit_width + stack.matmuls.split_width / tp) / 2
        return width, width
    hidden, routed = stack.hidden / parts, (stack.dispatched or stack.hidden) / parts
    attention, width = stack.attention_width / tp, stack.mlp_width / tp
    outputs = attention + 2 * stack.key_value_width / tp + hidden
    return hidden + attention + routed + width, outputs + (2 if stack.gated else 1) * width + routed


def _with_host(device: float, host: float, rates: DeviceRates) -> float:
    """Return the longer of both: a device runs beside its host and is never faster; a CPU is both, in turns."""
    return device + host if rates.serial else max(device, host)


def _host_seconds(stack: Stack, rates: DeviceRates, tp: int) -> float:
    """Return the seconds of launching the forward of one block."""
    if stack.launches:
        return stack.launches * rates.code.kernel_host_seconds
    if not stack.norms:
        return stack.matmuls.kernels * rates.code.kernel_host_seconds
    experts = max(0, stack.matmuls.kernels - USUAL_MATMULS) + (rates.code.dispatch_kernels if stack.dispatched else 0)
    collectives = BLOCK_COLLECTIVES * COLLECTIVE_KERNELS if tp > 1 else 0
    return rates.code.block_host_seconds + (experts + collectives) * rates.code.kernel_host_seconds


HOOK_SECONDS = 0.4e-3
"""Of the host for one of a block's parameters whenever a module fetches and releases it under DeepSpeed's ZeRO-3, in
the forward, where it is run again and in the backward (deepspeed/runtime/zero/parameter_offload.py and
partitioned_param_coordinator.py). Steps too short to hide it took 0.3 ms on one A100 and 0.5 on two (QwenLM/Qwen
README.md, samples of 256 and 512 tokens), and 1.0 on 16 V100 of 2021 (microsoft/DeepSpeedExamples autotuning)."""


def _hook_seconds(stack: Stack, job: Job) -> float:
    """Return the seconds of the host in which DeepSpeed's ZeRO-3 fetches and releases an average block's parameters."""
    chosen, blocks = job.configuration, job.counts.blocks
    if not (chosen.fetches_by_module and stack.norms and blocks):
        return 0.0
    tensors = sum(block.repeats * (len(block.shapes) or TENSORS_PER_BLOCK) for block in blocks)
    return HOOK_SECONDS * tensors / sum(block.repeats for block in blocks)


def head_passes(job: Job, shape: Geometry, rates: DeviceRates) -> Passes:
    """Return the passes of the output projection and the loss on one micro-batch of one rank."""
    tp = job.configuration.tp
    tokens, width, hidden = head_tokens(job, shape) / job.configuration.cp, head_width(job), job.facts.hidden_size
    if not tokens:
        return NOTHING
    weights, share = head_weights(job), trained_share(job.counts)
    moved = (weights + tokens * width) / tp + tokens * hidden
    misaligned = rates.element_bytes == 2 and not rates.code.pads_vocabulary and -(-width // tp) % ALIGNED_ELEMENTS
    waste = 1 / MISALIGNED_SHARE if misaligned and not rates.serial else 1.0
    work = 2.0 * tokens * weights / tp, moved, 1, waste
    logits = tokens * width / tp
    kernel = 2 * rates.element_bytes * logits
    loss = rates.elementwise((rates.code.loss_bytes - LOG_SOFTMAX_BYTES) * logits, kernel)
    loss += rates.exponentials(LOG_SOFTMAX_BYTES * logits, kernel)
    backward = rates.products_backward(*work) * (1 if share is ALL_TRAINED else (1 + share.head) / 2)
    host = HEAD_KERNELS / BLOCK_KERNELS * rates.code.block_host_seconds if not rates.serial else 0.0
    forward = (1 + job.extra_forwards) * _with_host(rates.products(*work) + loss / 2, host, rates)
    return Passes(forward=forward, backward=_with_host(backward + loss / 2, BACKWARD * host, rates))
