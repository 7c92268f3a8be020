"""Blocks as HTML. Everything in them is text, whatever a person called a model or a run."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Bar, Cell, Column, Table
from hardware_db.notices import MOST_LETTERS


def blocks_html(blocks: Iterable[Block]) -> str:
    """Paragraphs and tables, with classes for their looks.

    `style-warning`, and `rank-2` for columns that a narrow window leaves out.
    """
    return "".join(_table(block) if isinstance(block, Table) else _paragraph(block) for block in blocks)


def plain(text: str, *, most: int | None = MOST_LETTERS) -> str:
    """Return a text for the inside of an element or of a quoted attribute.

    Markup escaped, control characters left out, and cut after `most` letters.
    """
    shown = "".join(letter for letter in text[:most] if letter.isprintable() or letter == "\n")
    return escape(shown) + ("…" if most is not None and len(text) > most else "")


def _paragraph(block: Text) -> str:
    return f'<p class="style-{block.style or "plain"}">{plain(block.text)}</p>' if block.text else ""


def _table(table: Table) -> str:
    caption = f"<caption>{plain(table.title)}</caption>" if table.title else ""
    heads = "".join(f'<th scope="col" class="{_classes(column)}">{plain(column.name)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{_row(row, table)}</tr>" for row in table.rows)
    return f'<table class="blocks">{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _row(row: Iterable[Cell], table: Table) -> str:
    cells = zip(row, table.columns, strict=True)
    return "".join(f'<td class="{_classes(column)}">{_cell(cell)}</td>' for cell, column in cells)


def _classes(column: Column) -> str:
    return f"rank-{column.rank}{' figure' if column.right else ''}"


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Bar):
        return plain(cell)
    share = min(max(cell.share, 0.0), 1.0)
    text = f"{cell.share:.0%}"
    return f'<span class="bar {cell.state}" style="--share:{share:.3f}"><span>{text}</span></span>'
