"""Replacing attributes of torch's modules and classes, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], None]


def replace(owner: object, **replacements: object) -> Undo:
    """Put each replacement where the owner's attribute of that name was; the caller keeps the originals to call them.

    Returns:
        What puts the originals back, except where somebody else has replaced them since.
    """
    originals = {name: vars(owner)[name] for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)

    def undo() -> None:
        for name, original in originals.items():
            if vars(owner)[name] is replacements[name]:
                setattr(owner, name, original)

    return undo


@contextmanager
def replaced(owner: object, **replacements: object) -> Iterator[None]:
    """Replace the owner's attributes inside the context."""
    undo = replace(owner, **replacements)
    try:
        yield
    finally:
        undo()
