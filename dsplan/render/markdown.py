"""Blocks as Markdown, for pages that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsplan.render.blocks import Bar, Block, Cell, Table


def markdown(blocks: Iterable[Block], *, title: str) -> str:
    """A page of the blocks under a heading."""
    parts = [f"# {title}", *(_table(block) if isinstance(block, Table) else block.text for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [
        _line([column.name for column in table.columns]),
        _line(["---:" if column.right else "---" for column in table.columns]),
        *(_line(row) for row in table.rows),
    ]
    return "\n".join([f"## {table.title}", "", *lines] if table.title else lines)


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return f"{cell.share:.0%}"
    return cell.replace("\\", "\\\\").replace("|", "\\|")
