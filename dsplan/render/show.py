"""Prints an answer: through rich on a terminal, as plain text or JSON elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from dsplan.render.blocks import Block


def show(blocks: Sequence[Block]) -> None:
    """Print blocks to stdout. Rich is imported only for a terminal: a pipe neither needs it nor waits for it."""
    if sys.stdout.isatty():
        from dsplan.render.pretty import print_blocks

        print_blocks(blocks)
    else:
        from dsplan.render.plain import plain_text

        sys.stdout.write(plain_text(blocks))


def show_json(value: object) -> None:
    """Print one JSON document to stdout; a figure that is not a number in JSON's sense is a bug and raises."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
