"""Mixture-of-experts feed-forward parts."""

from __future__ import annotations

from planner.models.counting.weights import NOTHING, Weights, linear, mlp, vector
from planner.models.facts import ModelFacts


def expert_parameters(facts: ModelFacts) -> int:
    """Parameters of one routed expert."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    inputs = 2 * width if facts.gated_mlp else width
    return hidden * (inputs + width) + (inputs + hidden if facts.expert_bias else 0)


def routed_experts(facts: ModelFacts) -> Weights:
    """All routed experts; transformers 5 keeps them in [experts, 2 * width, hidden] and [experts, hidden, width]."""
    inputs = (2 if facts.gated_mlp else 1) * facts.moe_intermediate_size
    largest = facts.num_experts * inputs * facts.hidden_size
    return Weights(facts.num_experts * expert_parameters(facts), largest)


def router_and_shared(facts: ModelFacts) -> Weights:
    """The router, the experts every token passes through, and their gate."""
    router = linear(facts.hidden_size, facts.num_experts, bias=facts.router_bias)
    width = facts.shared_expert_intermediate_size or facts.num_shared_experts * facts.moe_intermediate_size
    shared = mlp(facts, width) if facts.num_shared_experts else NOTHING
    return router + shared + (vector(facts.hidden_size) if facts.shared_expert_gate else NOTHING)
