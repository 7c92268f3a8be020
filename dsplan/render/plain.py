"""Blocks as plain ASCII-framed text, for pipes and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsplan.render.blocks import Bar, Block, Cell, Table


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
