"""The lines that dsplan prints among a script's own output."""

from __future__ import annotations

import os
import sys
from typing import Literal

LABEL = "dsplan: "


def notice(text: str, *, stream: Literal["stdout", "stderr"] = "stderr", rank_zero: bool = False) -> None:
    """Print `text` with dsplan's label, at once; `rank_zero` leaves it to the first of torchrun's ranks."""
    if not rank_zero or os.environ.get("RANK", "0") == "0":
        print(labelled(text), file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def labelled(text: str) -> str:
    """The text with dsplan's label before every line."""
    return "\n".join(LABEL + line for line in text.split("\n"))
