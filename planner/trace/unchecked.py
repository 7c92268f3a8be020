"""Checks of a batch's values, which fake tensors do not have."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def unchecked(module: nn.Module) -> Iterator[None]:
    """A transformers model does not compare the number of image tokens in the text with its images."""
    home: Any = sys.modules.get(type(module).__module__)
    original = getattr(home, "torch_compilable_check", None)
    if original is None:
        yield
        return
    home.torch_compilable_check = _passed
    try:
        yield
    finally:
        home.torch_compilable_check = original


def _passed(*_arguments: object, **_named: object) -> None:
    return None
