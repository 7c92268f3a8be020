"""A memo for functions of one immutable value that is too costly, or not able, to be hashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_KEPT = 64


def memo_by_identity(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """Remember the results for the last 64 objects, told apart by identity.

    A catalogue entry has some ninety fields, some of them mappings: hashing it costs more than the arithmetic that is
    saved. The entry holds its key, so an identity cannot be reused while it is remembered.
    """
    seen: dict[int, tuple[Key, Value]] = {}

    def remembered(key: Key) -> Value:
        entry = seen.get(id(key))
        if entry is None or entry[0] is not key:
            if len(seen) >= _KEPT:
                seen.clear()
            entry = seen[id(key)] = (key, function(key))
        return entry[1]

    return remembered
