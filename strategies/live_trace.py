"""The activations of the script's own module, traced with a sample of its own data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from planner.models.facts import ModelFacts
from planner.models.tracer import trace_activations
from planner.trace.blocks import repeated_blocks


def traced(facts: ModelFacts, model: nn.Module, training_data: Any, precision: str) -> ModelFacts:
    """The facts with what a trace found, for a module that no closed form describes and whose data is at hand.

    A module may do anything in its forward pass, also what fake tensors cannot follow; the note then says that its
    activations are a rule of thumb, and why.
    """
    if facts.kind != "custom":
        return facts
    if training_data is None or not hasattr(training_data, "__getitem__"):
        return replace(facts, note="no sample of training_data to trace it with")
    try:
        found = trace_activations(
            model, lambda samples: default_collate([training_data[0]] * samples), repeated_blocks(model), precision
        )
    except Exception as problem:
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        return replace(facts, note=f"tracing it on fake tensors failed: {reason[0][:120]}")
    return replace(facts, traced=found)
