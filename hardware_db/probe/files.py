"""Reading the small text files of /proc and /sys; a file that is not there or not readable is None."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the stripped text of a file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the whole number in a file, or None if there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text.split()[0], 0)
    except (ValueError, IndexError):
        return None


def children(path: Path) -> list[Path]:
    """The entries of a directory in order of name, empty where it is not there."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
