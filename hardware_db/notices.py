"""The lines that dsplan prints among a script's own output, and what of a text a terminal may be sent."""

from __future__ import annotations

import os
import sys
from typing import Literal

LABEL = "dsplan: "
MOST_LETTERS = 4000
"""Of one text; a longer one is cut, as nobody reads on."""


def notice(text: str, *, stream: Literal["stdout", "stderr"] = "stderr", rank_zero: bool = False) -> None:
    """Print `text` with dsplan's label, at once; `rank_zero` leaves it to the first of torchrun's ranks."""
    if not rank_zero or os.environ.get("RANK", "0") == "0":
        print(labelled(text), file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def labelled(text: str) -> str:
    """The text, as far as it is printable, with dsplan's label before every line."""
    return "\n".join(LABEL + printable(line) for line in text.split("\n"))


def printable(text: str) -> str:
    """A text whose control characters (a terminal would obey them) are left out, cut after `MOST_LETTERS`."""
    if len(text) <= MOST_LETTERS and text.isprintable():
        return text
    kept = "".join(letter for letter in text[:MOST_LETTERS] if letter.isprintable() or letter == "\n")
    return kept + ("…" if len(text) > MOST_LETTERS else "")
