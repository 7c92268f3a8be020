"""How a catalogue name is compared: without case, spaces, dashes and underscores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile

_IGNORED = str.maketrans("", "", " -_")


def normalise(name: str) -> str:
    """The form in which two spellings of one name are equal: `RTX 4090`, `rtx-4090` and `RTX4090` are one name."""
    return name.lower().translate(_IGNORED)


def name_index(rows: Iterable[Mapping[str, Any]], path: Path) -> dict[str, int]:
    """Every normalised name and alias with the position of its row.

    Raises:
        BrokenFile: two rows answer to one name.
    """
    index: dict[str, int] = {}
    owners: list[str] = []
    for position, row in enumerate(rows):
        owners.append(row["name"])
        for spelling in (row["name"], *row.get("aliases", ())):
            owner = index.setdefault(normalise(spelling), position)
            if owner != position:
                raise BrokenFile(path, f"{owners[owner]!r} and {row['name']!r} both answer to {spelling!r}", "drop one")
    return index
