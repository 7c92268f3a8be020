"""Local attention as flash attention does it: told of its window by a number, where torch's function takes a mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any


@contextlib.contextmanager
def windows_without_masks() -> Iterator[None]:
    """transformers makes no masks for torch's attention function: the tensors of a step with flash attention."""
    try:
        masks: Any = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:  # a module of the user's own, and no transformers
        yield
        return
    masks["sdpa"] = _no_mask
    try:
        yield
    finally:
        del masks["sdpa"]  # the library's own shows again


def _no_mask(*_arguments: Any, **_named: Any) -> None:
    return None
