"""Calls of a model's blocks, captured so that one of them can be run by itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from strategies.parallel.stages import show_inputs
from strategies.parallel.styles import is_linear, widths

_log = logging.getLogger(__name__)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones, the activations first, and those by name."""


class _Reached(Exception):
    """A forward pass has come to the block whose arguments are wanted."""


def arguments_of(inner: Any, block: nn.Module, length: int) -> Arguments | None:
    """Return what a model calls its block with for tokens of so many positions; None: not known."""
    vocabulary = getattr(getattr(inner, "config", None), "vocab_size", 0)
    is_named = bool(vocabulary) and getattr(inner, "main_input_name", "") == "input_ids"
    if not is_named:
        rows = [module.num_embeddings for module in inner.modules() if isinstance(module, nn.Embedding)]
        vocabulary = min(rows, default=0)  # which of its tables tokens are looked up in is not known
    if vocabulary:
        device = next(inner.parameters()).device
        tokens = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(2)).to(device)
        named = {"input_ids": tokens, "use_cache": False} if is_named else {}
        captured = _capture(inner, block, () if is_named else (tokens,) * _count_required(inner), named)
        if captured is not None:
            return captured
    inputs = [widths(module)[0] for module in block.modules() if is_linear(module)]
    if not inputs:
        return None
    return (torch.randn(2, length, inputs[0], generator=torch.Generator().manual_seed(2)),), {}


def _count_required(module: nn.Module) -> int:
    """Count the positional arguments that a forward pass has to be given; one at least."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return max(1, sum(1 for taken in parameters if taken.kind in kinds and taken.default is inspect.Parameter.empty))


def _capture(inner: nn.Module, block: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments | None:
    seen: list[Arguments] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, dict(kwargs)))
        raise _Reached

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), show_inputs(inner):
            inner(*given, **named)
    except _Reached:
        pass
    except Exception:  # whatever a model raises that wants other arguments
        _log.debug("%s does not come to its blocks", type(inner).__name__, exc_info=True)
    finally:
        handle.remove()
    if not seen:
        return None
    args, kwargs = seen[0]
    if not args and "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"),)
    return (args, kwargs) if args and isinstance(args[0], torch.Tensor) else None
