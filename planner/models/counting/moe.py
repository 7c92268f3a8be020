"""Mixture-of-experts feed-forward parts."""

from __future__ import annotations

from planner.models.counting.weights import NOTHING, Weights, experts_as_kept, linear, mlp, tensor
from planner.models.facts import ModelFacts


def expert_parameters(facts: ModelFacts) -> int:
    """Parameters of one routed expert."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    inputs = 2 * width if facts.gated_mlp else width
    return hidden * (inputs + width) + (inputs + hidden if facts.expert_bias else 0)


def routed_experts(facts: ModelFacts) -> Weights:
    """All routed experts; transformers 5 keeps them in [experts, 2 * width, hidden] and [experts, hidden, width]."""
    experts, hidden, width = facts.num_experts, facts.hidden_size, facts.moe_intermediate_size
    inputs = (2 if facts.gated_mlp else 1) * width
    weights = experts_as_kept(facts, tensor(experts, inputs, hidden) + tensor(experts, hidden, width))
    return weights + tensor(experts, inputs) + tensor(experts, hidden) if facts.expert_bias else weights


def router_and_shared(facts: ModelFacts) -> Weights:
    """The router, the experts every token passes through, and their gate."""
    router = linear(facts.hidden_size, facts.num_experts, bias=facts.router_bias)
    width = facts.shared_expert_intermediate_size or facts.num_shared_experts * facts.moe_intermediate_size
    shared = mlp(facts, width) if facts.num_shared_experts else NOTHING
    return router + shared + (tensor(1, facts.hidden_size) if facts.shared_expert_gate else NOTHING)
