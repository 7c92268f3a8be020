"""The cases on which closed forms are held to traces: every family of the catalogue in varied configurations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner import vocabulary as words
from planner.models.catalogue import models
from planner.models.facts import ModelFacts
from planner.vocabulary import Strategy
from strategies.tracing.to_hf import NOT_IN_TRANSFORMERS

PER_FAMILY = 4
SEED = 20
LONGEST_EAGER = 2048
_LARGEST = 15e9
"""Parameters: deeper models say nothing more about a form, and take longer to trace."""
_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_STRATEGIES: Sequence[Strategy] = ("single", "single", "ddp", "fsdp", "fsdp", "fsdp-grad-op")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceCase:
    """One question to both the closed form and the trace."""

    model: str
    strategy: Strategy
    world_size: int
    micro_batch: int
    accumulation: int
    length: int
    precision: words.Precision
    attention: words.Attention
    checkpointing: words.Checkpointing
    optimizer: words.Optimizer


def trace_grid() -> list[TraceCase]:
    """Return the same cases every time."""
    chance = random.Random(SEED)
    return [case for family in _families() for case in _cases(family, chance)]


def _families() -> Iterator[list[ModelFacts]]:
    types = dict.fromkeys(facts.model_type for facts in models() if facts.model_type not in NOT_IN_TRANSFORMERS)
    for model_type in types:
        rows = [facts for facts in models() if facts.model_type == model_type]
        yield [facts for facts in rows if facts.parameters < _LARGEST] or rows[:1]


def _cases(family: list[ModelFacts], chance: random.Random) -> Iterator[TraceCase]:
    for _ in range(PER_FAMILY):
        facts = chance.choice(family)
        strategy = chance.choice(_STRATEGIES)
        eager = facts.eager_only or chance.random() < 0.25
        yield TraceCase(
            model=facts.name,
            strategy=strategy,
            world_size=1 if strategy == "single" else chance.choice((2, 4, 8, 16, 64)),
            micro_batch=chance.choice((1, 2, 4, 8, 16)),
            accumulation=chance.choice((1, 1, 2)),
            length=_length(facts, chance, eager=eager),
            precision=chance.choice(words.PRECISIONS),
            attention="eager" if eager else "sdpa",
            checkpointing=chance.choice(("none", "none", "full", "selective")),
            optimizer=chance.choice(("adamw", "adamw", "adamw-fused", "adamw-forloop", "sgd", "lion")),
        )


def _length(facts: ModelFacts, chance: random.Random, *, eager: bool) -> int:
    """Within what the model has positions for; images and audio have one length."""
    if facts.kind == "vision":
        return facts.max_position_embeddings
    longest = facts.max_target_positions or facts.max_position_embeddings or 2048
    if facts.text is not None:
        longest = facts.text.max_position_embeddings
    if eager:
        longest = min(longest, LONGEST_EAGER)
    possible = [length for length in _LENGTHS if length <= longest]
    return chance.choice(possible or [longest])
