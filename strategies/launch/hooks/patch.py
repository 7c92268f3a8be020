"""Replacing a callable of another library, in one place that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(owner: object, name: str, replacement: Callable[..., Any]) -> None:
    """Put `replacement` where `owner.name` was; the caller keeps the original and calls it."""
    setattr(owner, name, replacement)
