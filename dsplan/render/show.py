"""Prints an answer: through rich on a terminal, as plain text or JSON elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from dsplan.render.blocks import Bar, Block, Cell, Table

# Blocks as plain ASCII-framed text, for pipes and files.


def plain_text(blocks: Iterable[Block]) -> str:
    """The blocks as text that ends in a newline; tables are as wide as their content."""
    return "".join(f"{_table(block) if isinstance(block, Table) else block.text}\n" for block in blocks)


def _table(table: Table) -> str:
    cells = [[column.name for column in table.columns], *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    lines = [_line(row, widths, table) for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", table.title, *lines] if table.title else lines)


def _line(row: Sequence[str], widths: Sequence[int], table: Table) -> str:
    aligned = (
        text.rjust(width) if column.right else text.ljust(width)
        for text, width, column in zip(row, widths, table.columns, strict=True)
    )
    return "  ".join(aligned).rstrip()


def _cell(cell: Cell) -> str:
    return "#" * cell.filled + "." * (cell.width - cell.filled) if isinstance(cell, Bar) else cell


# Progress on a terminal; nothing elsewhere.


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows a line with a spinner on stderr until the block ends. Rich is imported with its first line:
    answers that are at hand neither need it nor wait for it."""
    with contextlib.ExitStack() as shown:
        lines: list[Callable[[str], None]] = []

        def report(text: str) -> None:
            if not sys.stderr.isatty():
                return
            if not lines:
                lines.append(_spinner(shown, text))
            lines[0](text)

        yield report


def _spinner(shown: contextlib.ExitStack, text: str) -> Callable[[str], None]:
    from rich.console import Console

    status = shown.enter_context(Console(stderr=True, highlight=False, markup=False).status(text))
    return status.update


def show(blocks: Sequence[Block]) -> None:
    """Print blocks to stdout. Rich is imported only for a terminal: a pipe neither needs it nor waits for it."""
    if sys.stdout.isatty():
        from dsplan.render.pretty import print_blocks

        print_blocks(blocks)
    else:
        sys.stdout.write(plain_text(blocks))


def show_json(value: object) -> None:
    """Print one JSON document to stdout; a figure that is not a number in JSON's sense is a bug and raises."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
