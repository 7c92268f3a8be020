"""Modules of transformers for rows of the catalogue, without memory for their weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from planner.models.facts import ModelFacts
from strategies.tracing.to_hf import model_class


def meta_model(config: Any, facts: ModelFacts) -> nn.Module:
    """Return the class named by the row, on the meta device; an untied T5 head as `from_pretrained` leaves it."""
    with torch.device("meta"):
        model: Any = model_class(facts)(copy.deepcopy(config))
    if facts.model_type in ("t5", "mt5") and not facts.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    module: nn.Module = model
    return module


def real_count(model: nn.Module) -> int:
    """Count the parameters, each once however many names it has."""
    return sum(parameter.numel() for parameter in model.parameters())
