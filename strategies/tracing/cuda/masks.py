"""Unpadded: transformers' attention masks as they are made for batches without padding or packing.

To leave a mask out, transformers looks at the data of the batch, and where tensors are fake it makes a mask to be safe.
A real batch of whole samples has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

# Local attention of flash attention, which takes the window as a number and not as a mask.


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


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """Let transformers believe that no sample is padded and none packed, while it runs on fake tensors."""
    try:
        masks: Any = import_module("transformers.masking_utils")
    except ImportError:  # a module of the user's own, and no transformers
        yield
        return
    with contextlib.ExitStack() as restored:
        _replace(masks, "find_packed_sequence_indices", lambda _: _not_packed, restored)
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            _replace(masks, name, _without_padding, restored)
        yield


def _not_packed(*_positions: Any, **_named: Any) -> None:
    return None


def _without_padding(skips: Callable[..., Any]) -> Callable[..., Any]:
    def skips_unpadded(padding_mask: Any = None, *rest: Any, **named: Any) -> Any:
        return skips(None, *rest, **named)

    return skips_unpadded


def _replace(module: Any, name: str, changed: Callable[[Any], Any], restored: contextlib.ExitStack) -> None:
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, changed(original))
        restored.callback(setattr, module, name, original)
