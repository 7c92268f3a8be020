"""A module of the user's own as the subject of a trace: what it is fed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.errors import DsplanError
from planner.models.facts import ModelFacts
from planner.trace.blocks import repeated_blocks
from planner.trace.build import Subject
from planner.vocabulary import Attention

EXAMPLE = "example_batch"
"""A method that a module may have: its arguments for `samples` samples of `length` positions."""
_TARGETS = frozenset({"labels", "label", "targets", "target", "y"})
_MASKS = frozenset({"attention_mask", "mask", "padding_mask"})
_IMAGE_SIZES = ("image_size", "img_size")
_USUAL_IMAGE = 224


@dataclass(frozen=True, kw_only=True)
class OwnSubject(Subject):
    """A module that transformers has no class for."""

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> dict[str, Any]:
        """Arguments by name: what the module's `example_batch(samples, length)` says, or what its parts suggest."""
        own: Any = self.module
        if hasattr(own, EXAMPLE):
            return _named(own, getattr(own, EXAMPLE)(samples, length))
        return _inferred(own, samples, length)


def own_subject(module: nn.Module, facts: ModelFacts, attention: Attention) -> Subject:
    """The subject of a module that a factory made. A transformers model is run as dsplan runs its own."""
    module.train()
    blocks, config = tuple(repeated_blocks(module)), getattr(module, "config", None)
    if facts.kind == "custom":
        return OwnSubject(facts=facts, config=config, module=module, blocks=blocks)
    described: Any = module
    described.config.use_cache = False
    if attention == "eager" and hasattr(module, "set_attn_implementation"):
        described.set_attn_implementation("eager")
    return Subject(facts=facts, config=config, module=module, blocks=blocks)


def _named(module: nn.Module, batch: Any) -> dict[str, Any]:
    """Arguments by the names of the module's parameters."""
    if isinstance(batch, Mapping):
        return dict(batch)
    values = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    return dict(inspect.signature(module.forward).bind(*values).arguments)


def _inferred(module: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """The first parameter is fed what the first layer takes, targets and masks one number a position.

    Raises:
        DsplanError: there is another parameter, of which nothing is known.
    """
    batch: dict[str, Any] = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not batch:
            batch[name] = _first_input(module, samples, length)
        elif name in _TARGETS or (name in _MASKS and parameter.default is parameter.empty):
            batch[name] = torch.ones(samples, length, dtype=torch.long)
        elif parameter.default is parameter.empty:
            remedy = f"give it a method {EXAMPLE}(samples, length)"
            raise DsplanError(f"nothing is known of {type(module).__name__}'s input {name!r}; {remedy}")
    return batch


def _first_input(module: nn.Module, samples: int, length: int) -> torch.Tensor:
    kinds = (nn.Embedding, nn.Linear, nn.modules.conv._ConvNd)
    first = next((part for part in module.modules() if isinstance(part, kinds)), None)
    if isinstance(first, nn.modules.conv._ConvNd):
        named = (getattr(module, name, None) for name in _IMAGE_SIZES)
        size = next((side for side in named if isinstance(side, int)), _USUAL_IMAGE)
        sides = (length,) if isinstance(first, nn.Conv1d) else (size,) * len(first.kernel_size)
        return torch.zeros(samples, first.in_channels, *sides)
    if isinstance(first, nn.Linear):
        positions = () if length == 1 else (length,)
        return torch.zeros(samples, *positions, first.in_features)
    return torch.zeros(samples, length, dtype=torch.long)
