"""Blocks on a terminal, through rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from dsplan.render.blocks import Bar, Block, Cell, Table

_STYLES = {"": "", "heading": "bold", "good": "green", "warning": "yellow", "bad": "red", "faint": "dim"}

_WIDE = 100


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print to stdout, folded to the terminal's width."""
    console = Console(highlight=False, markup=False, emoji=False)
    for block in blocks:
        if isinstance(block, Table):
            if block.title:
                console.print()
            shown, left_out = _narrowed(block, console.width)
            console.print(_table(shown, console))
            if left_out:
                console.print(RichText(f"a wider terminal also shows {', '.join(left_out)}", style="dim"))
        else:
            console.print(RichText(block.text, style=_STYLES[block.style]))


def _narrowed(table: Table, width: int) -> tuple[Table, list[str]]:
    """The table without as many of its last optional columns as are too wide for the terminal, and their names."""
    widths = [
        max([len(column.name), *(_width(row[index]) for row in table.rows)])
        for index, column in enumerate(table.columns)
    ]
    gap = 2 if width >= _WIDE else 1
    kept = list(range(len(table.columns)))
    for index in reversed(range(len(table.columns))):
        if sum(widths[column] + gap for column in kept) - gap <= width:
            break
        if table.columns[index].optional:
            kept.remove(index)
    left_out = [column.name for index, column in enumerate(table.columns) if index not in kept]
    rows = [[row[index] for index in kept] for row in table.rows]
    return Table(columns=[table.columns[index] for index in kept], rows=rows, title=table.title), left_out


def _table(table: Table, console: Console) -> RichTable:
    unicode = console.encoding.startswith("utf")
    drawn = RichTable(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1 if console.width >= _WIDE else 0, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(table.columns):
        drawn.add_column(column.name, justify="right" if column.right else "left", no_wrap=index == 0)
    for row in table.rows:
        drawn.add_row(*(_cell(cell, unicode=unicode) for cell in row))
    return drawn


def _width(cell: Cell) -> int:
    return cell.width if isinstance(cell, Bar) else len(cell)


def _cell(cell: Cell, *, unicode: bool) -> RichText:
    if not isinstance(cell, Bar):
        return RichText(cell)
    full, empty = ("█", "░") if unicode else ("#", ".")
    colour = "red" if cell.share > 1 else "yellow" if cell.share > 0.9 else "green"
    return RichText(full * cell.filled, style=colour) + RichText(empty * (cell.width - cell.filled), style="dim")
