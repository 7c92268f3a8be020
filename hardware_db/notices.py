"""The lines that dsplan prints among a script's own output, and what of a text a terminal may be sent."""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO

LABEL = "dsplan: "
_NARROW = 20
"""Columns that any terminal has."""
MOST_LETTERS = 4000
"""Of one text; a longer one is cut, as nobody reads on."""


def notice(text: str, *, stream: Literal["stdout", "stderr"] = "stderr", rank_zero: bool = False) -> None:
    """Print `text` with dsplan's label, at once; `rank_zero` leaves it to the first of torchrun's ranks."""
    if not rank_zero or os.environ.get("RANK", "0") == "0":
        file = sys.stdout if stream == "stdout" else sys.stderr
        print(fold_lines(label_lines(text), file), file=file, flush=True)


def label_lines(text: str) -> str:
    """Return the text, as far as it is printable, with dsplan's label before every line."""
    return "\n".join(LABEL + printable(line) for line in text.split("\n"))


def fold_lines(text: str, file: TextIO) -> str:
    """Return the text with its lines folded between words where `file` is a terminal, which would fold them in words.

    What follows on is indented as the line is. Words that are wider than the terminal stay whole.
    """
    if (text.isascii() and len(text) < _NARROW) or not file.isatty():
        return text
    import shutil
    import textwrap

    width = max(shutil.get_terminal_size().columns, 1)
    lines = []
    for line in text.split("\n"):
        indent = " " * min(len(line) - len(line.lstrip()), width // 2)
        parts = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            drop_whitespace=True, replace_whitespace=False,
        )  # fmt: skip
        lines += parts or [line]
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return a text whose control characters (a terminal would obey them) are left out, cut after `MOST_LETTERS`."""
    if len(text) <= MOST_LETTERS and text.isprintable():
        return text
    kept = "".join(letter for letter in text[:MOST_LETTERS] if letter.isprintable() or letter == "\n")
    return kept + ("…" if len(text) > MOST_LETTERS else "")
