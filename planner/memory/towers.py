"""A job's model as stacks of blocks with the tokens, lengths and per-device widths that each sees."""

from __future__ import annotations

from planner.job import Job
from planner.memory.saved import Stack
from planner.models.facts import TowerFacts


def stacks_of(job: Job) -> tuple[Stack, ...]:
    """The stacks of one pipeline stage, the one that ends in the output head last."""
    facts = job.facts
    if facts.kind.endswith("encoder-decoder"):
        return _encoder_decoder(job)
    if facts.kind == "vision-text":
        return tuple(_tower(job, tower) for tower in (facts.vision, facts.text) if tower is not None)
    images = (_tower(job, facts.vision),) if facts.vision is not None else ()
    return (*images, _main(job, facts.num_layers, job.configuration.sequence_length))


def source_length(job: Job) -> int:
    """Encoder positions per sample: the workload's, a speech model's fixed window, or the decoder's length."""
    return job.facts.max_source_positions or job.workload.source_length or job.configuration.sequence_length


def _encoder_decoder(job: Job) -> tuple[Stack, ...]:
    facts = job.facts
    length = source_length(job)
    encoder = _main(job, facts.encoder_layers or facts.num_layers, length)
    decoder = _main(job, facts.decoder_layers, job.configuration.sequence_length)
    crossing = Stack(
        **{name: getattr(decoder, name) for name in _SHARED},
        is_decoder=True,
        memory_tokens=encoder.tokens,
        memory_length=length,
    )
    return encoder, crossing


_SHARED = ("layers", "tokens", "length", "hidden", "query", "key_value", "heads", "intermediate")


def _main(job: Job, layers: int, length: int) -> Stack:
    facts, configuration = job.facts, job.configuration
    tp = configuration.tp
    head_dim, value_dim = facts.head_dim, facts.head_dim
    if facts.mla is not None:
        head_dim = facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim
        value_dim = facts.mla.v_head_dim
    key_heads = facts.num_heads if facts.mla is not None else facts.num_kv_heads
    return Stack(
        layers=-(-layers // configuration.pp),
        tokens=configuration.micro_batch_size * length,
        length=length,
        hidden=facts.hidden_size,
        query=facts.num_heads * head_dim // tp,
        key_value=max(key_heads * (head_dim + value_dim) // 2 // tp, value_dim),
        heads=max(facts.num_heads // tp, 1),
        intermediate=facts.intermediate_size // tp,
    )


def _tower(job: Job, tower: TowerFacts) -> Stack:
    length = tower.image_tokens or min(job.configuration.sequence_length, tower.max_position_embeddings or 1 << 30)
    tp = job.configuration.tp
    return Stack(
        layers=-(-tower.num_layers // job.configuration.pp),
        tokens=job.configuration.micro_batch_size * length,
        length=length,
        hidden=tower.hidden_size,
        query=tower.hidden_size // tp,
        key_value=tower.hidden_size // tp,
        heads=max(tower.num_heads // tp, 1),
        intermediate=tower.intermediate_size // tp,
    )
