"""Texts as the readings that dsplan makes of them."""

from __future__ import annotations

from pathlib import Path

from planner.read.form import Reading
from planner.read.recognise import read_files


def write(folder: Path, **texts: str) -> list[Path]:
    """Files of a folder by name, `_` before the ending for the dot: `train_yaml`."""
    paths = []
    for name, text in texts.items():
        stem, _, ending = name.rpartition("_")
        path = folder / f"{stem}.{ending}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def read(folder: Path, **texts: str) -> Reading:
    return read_files(write(folder, **texts))


def became(reading: Reading) -> dict[str, tuple[str, object]]:
    """Field and value of every key that was understood."""
    return {item.key: (item.field, item.value) for item in reading.read}
