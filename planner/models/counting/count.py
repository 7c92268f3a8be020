"""Exact parameter counts, component by component, from ModelFacts.

The count is that of the class `facts.architecture` names as transformers 5.23 builds it, tied weights once, buffers not
at all; `docs/how-to/adding-a-model.md` lists the three places where publishers count otherwise.
"""

from __future__ import annotations

from planner.models.counting.architectures import (
    count_decoder,
    count_encoder,
    count_encoder_decoder,
    count_vision,
    count_vision_language,
    count_vision_text,
)
from planner.models.counting.weights import expert_parameters
from planner.models.facts import ModelFacts, ParameterCounts

_COUNTERS = {
    "decoder": count_decoder,
    "encoder": count_encoder,
    "encoder-decoder": count_encoder_decoder,
    "speech-encoder-decoder": count_encoder_decoder,
    "vision": count_vision,
    "vision-text": count_vision_text,
    "vision-language": count_vision_language,
}


def count_parameters(facts: ModelFacts) -> ParameterCounts:
    """Parameters of the architecture by component.

    Raises:
        ValueError: the facts are of kind `custom` and carry no measured counts.
    """
    if facts.measured_counts is not None:
        return facts.measured_counts
    if facts.kind not in _COUNTERS:
        raise ValueError(f"{facts.name}: no count is known for kind {facts.kind!r}")
    return _COUNTERS[facts.kind](facts)


def active_parameters(facts: ModelFacts, counts: ParameterCounts | None = None) -> int:
    """Parameters that one token passes through, embedding and head included: all but the experts it skips."""
    counts = counts or count_parameters(facts)
    idle = max(facts.num_experts - facts.experts_per_token, 0) * expert_parameters(facts)
    return counts.total - sum(block.repeats * idle for block in counts.blocks if block.experts)
