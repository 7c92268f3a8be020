"""Floating-point operations of one micro-batch.

Two conventions, kept apart. *Executed* operations are what kernels compute: fused attention skips the masked half of a
causal product, recomputation runs the forward twice. *Model* operations are what MFU counts: forward and backward once,
attention in full, no recomputation (PaLM, arXiv 2204.02311, appendix B; llm-foundry and torchtitan count the same way).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.cost.memo import memo_by_identity
from planner.cost.split import recomputed_blocks
from planner.cost.timing.efficiency import BACKWARD
from planner.cost.timing.stacks import KINDS, Matmuls, Stack, measured_stacks, recorded_stacks, stacks, traced_stacks
from planner.models.facts import Adapter, ModelFacts, ParameterCounts
from planner.types.job import Job

# Convolutions that make tokens of pixels or sound, once before the blocks.


CHANNELS = 3
"""Of the images that the towers of CLIP and SigLIP see."""

WHISPER_KERNEL = 3
"""Width of Whisper's two convolutions over time; the second has a stride of two (`modeling_whisper.py`)."""


@memo_by_identity
def stems(facts: ModelFacts) -> tuple[Stack, ...]:
    """Return a convolution over patches, or two over time, each as the product that it is."""
    if facts.kind == "speech-encoder-decoder":
        hidden, frames = facts.hidden_size, facts.max_source_positions
        return (
            _convolution(facts.num_mel_bins * WHISPER_KERNEL, hidden, 2 * frames),
            _convolution(hidden * WHISPER_KERNEL, hidden, frames),
        )
    if facts.vision is not None and facts.vision.patch_size:
        return _patches(facts.vision.image_size, facts.vision.patch_size, CHANNELS, facts.vision.hidden_size)
    if facts.kind == "vision" and facts.patch_size:
        return _patches(facts.image_size, facts.patch_size, facts.num_channels, facts.hidden_size)
    return ()


def _patches(image_size: int, patch_size: int, channels: int, hidden: int) -> tuple[Stack, ...]:
    return (_convolution(channels * patch_size**2, hidden, (image_size // patch_size) ** 2),)


def _convolution(inputs: int, hidden: int, positions: int) -> Stack:
    """`positions` outputs of `hidden` channels, each from `inputs` numbers."""
    weights = inputs * hidden
    product = Matmuls(active=weights, stored=weights, unsplit_width=inputs, split_width=hidden, kernels=1)
    return Stack(layers=1, matmuls=product, norms=0, length_of="fixed", fixed_length=positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Token counts of one micro-batch on one rank: samples, tokens per sample in the main stack and in the source."""

    samples: int
    sequence: int
    source: int


def job_stacks(job: Job) -> tuple[Stack, ...]:
    """Return the stacks of a job's model; of an unknown architecture those that its parameter counts suggest."""
    if job.facts.recorded_as:
        return recorded_stacks(job.facts, job.counts, job.configuration.sequence_length)
    if job.facts.kind in KINDS:
        return stems(job.facts) + stacks(job.facts)
    if job.facts.traced:
        return traced_stacks(job.facts, job.counts)
    return measured_stacks(job.facts, job.counts, causal=job.workload.task in words.DECODING)


def executed_layers(job: Job) -> int:
    """Blocks that a step passes through, shared weights as often as they are used."""
    return max(1, sum(stack.layers for stack in job_stacks(job) if stack.norms))


def recomputed_share(job: Job) -> float:
    """Return the share of blocks that full checkpointing computes again; 0 without it."""
    layers = executed_layers(job)
    return recomputed_blocks(job.configuration, layers) / layers


def geometry(job: Job) -> Geometry:
    """Lengths of one micro-batch."""
    configuration = job.configuration
    return Geometry(
        samples=job.sequences,
        sequence=configuration.sequence_length,
        source=job.source_length,
    )


def attention_flops(stack: Stack, shape: Geometry) -> float:
    """Forward operations of scores and weighted values of one block, no mask skipped: 4 x queries x keys x width."""
    if not stack.attention_width:
        return 0.0
    length = stack.length(shape.sequence, shape.source)
    keys = stack.context(length) + (shape.source if stack.reads_source else 0) + stack.relative_keys
    return 4.0 * shape.samples * length * keys * stack.attention_width


def executed_attention_flops(stack: Stack, shape: Geometry) -> float:
    """Forward operations that a fused kernel runs: half of the causal part of `attention_flops`."""
    if not (stack.attention_width and stack.causal):
        return attention_flops(stack, shape)
    length = stack.length(shape.sequence, shape.source)
    keys = stack.context(length) / 2 + (shape.source if stack.reads_source else 0)
    return 4.0 * shape.samples * length * keys * stack.attention_width


def head_width(job: Job) -> int:
    """Columns of the output projection: the vocabulary for language models, labels for classifiers."""
    if job.facts.kind == "vision-text":
        return job.facts.projection_dim
    if job.workload.task in words.CLASSIFYING:
        return 1 if job.workload.task == "reward" else max(job.facts.num_labels, 2)
    # ELECTRA's discriminator says of each token whether it was replaced.
    return 1 if job.facts.architecture == "ElectraForPreTraining" else job.facts.vocab_size


def head_weights(job: Job) -> float:
    """Weight elements that a token of the head multiplies: the projection, and what lies between it and the blocks.

    Encoders transform each token first. Where embeddings are narrower than the blocks (ALBERT, OPT-350M), tokens are
    widened on the way in and narrowed on the way out.
    """
    facts, width = job.facts, head_width(job)
    hidden = facts.hidden_size
    if job.workload.task in words.CLASSIFYING or facts.kind == "vision-text":
        return float(width * hidden)
    inner = facts.embedding_size or facts.word_embed_proj_dim or hidden
    if width == 1:
        return float((hidden + 1) * hidden + (inner * hidden if inner != hidden else 0))
    transforms = (2 if inner != hidden else 0) or (1 if job.workload.task == "masked-lm" else 0)
    return float(width * inner + transforms * hidden * inner)


def head_tokens(job: Job, shape: Geometry) -> int:
    """Return the tokens that reach the output projection in one micro-batch.

    That is one per sample for classifiers; none where a trace counted the head with the rest.
    """
    if job.facts.traced or job.facts.recorded_as:
        return 0
    pooled = job.workload.task in words.CLASSIFYING or job.facts.kind == "vision-text"
    return shape.samples * (1 if pooled else shape.sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Shares of a model that a backward pass computes.

    Of the blocks' weights those that have gradients of their own, of the blocks those that gradients pass through, and
    whether the head's weights have gradients.
    """

    weights: float = 1.0
    passed: float = 1.0
    head: float = 1.0


ALL_TRAINED = Trained()
"""Where nothing is frozen."""


def trained_share(counts: ParameterCounts) -> Trained:
    """Return the shares of counts in which something is frozen; adapters are counted beside them (`adapters_of`)."""
    return ALL_TRAINED if counts.trains_all else _trained_share(counts)


@lru_cache(maxsize=64)
def _trained_share(counts: ParameterCounts) -> Trained:
    weights = trained = 0.0
    for block in counts.blocks:
        added = sum(prod(shape) for adapter in block.adapters for shape in adapter.shapes)
        weights += block.repeats * (block.parameters - added)
        trained += block.repeats * (block.trained.parameters - added)
    idle = 0
    if not counts.trained.embedding:
        for block in counts.blocks:
            if block.trained.parameters:
                break
            idle += block.repeats
    blocks = max(sum(block.repeats for block in counts.blocks), 1)
    outside = counts.trained.outside_blocks
    return Trained(
        weights=trained / weights if weights else counts.trained.total / counts.total,
        passed=1 - idle / blocks,
        head=1.0 if outside and (outside >= counts.head) else 0.0,
    )


@lru_cache(maxsize=64)
def adapters_of(counts: ParameterCounts) -> tuple[tuple[Adapter, float], ...]:
    """Return the adapters of the model's blocks, each with how many an average block has of it."""
    blocks = max(sum(block.repeats for block in counts.blocks), 1)
    return tuple((adapter, block.repeats / blocks) for block in counts.blocks for adapter in block.adapters)


def model_flops(job: Job) -> float:
    """Return model operations of one micro-batch on the whole model, forward and backward.

    Embedding look-ups are free. Frozen weights have no gradients, and blocks that none reach no backward at all.
    """
    shape = geometry(job)
    forward = 0.0
    for stack in job_stacks(job):
        tokens = shape.samples * stack.length(shape.sequence, shape.source)
        forward += stack.layers * (2.0 * stack.matmuls.active * tokens + attention_flops(stack, shape))
    head = 2.0 * head_weights(job) * head_tokens(job, shape)
    share, reference = trained_share(job.counts), float(job.extra_forwards)
    if share is ALL_TRAINED:
        return (forward + head) * (1 + reference + BACKWARD)
    beside = sum(
        often * adapter.rank * (adapter.inputs + adapter.outputs) for adapter, often in adapters_of(job.counts)
    )
    adapters = 2.0 * beside * executed_layers(job) * shape.samples * shape.sequence
    base = forward * (1 + reference + share.passed + share.weights) + head * (2 + reference + share.head)
    return base + adapters * (1 + BACKWARD)
