"""Columns of tables: their headings, which of them a narrow terminal leaves out first, and how wide the others are.

The views mark their headings (`columns`): a terminal leaves out those marked most, and of these the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from hardware_db.notices import printable
from hardware_db.records import dataclass

_WIDE = 100
_PROSE = 24
"""A column with longer cells is prose, and folded between its words."""
_LONGEST_WORD = 0.55
"""Of the terminal's width, within which a longer word, such as a model's name, is not folded."""
LEAST_BAR = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A share between 0 and 1, drawn `width` characters wide, or fewer where a terminal is narrow.

    Above 1 it is drawn full.
    """

    share: float
    width: int = 10
    of_limit: bool = True
    """Whether all is a limit, so that a share near it is to be noticed."""

    @property
    def state(self) -> Literal["below", "near", "over"]:
        """Distance from its limit, in a word."""
        if not self.of_limit:
            return "below"
        return "over" if self.share > 1 else "near" if self.share > 0.9 else "below"

    def count_filled(self, width: int) -> int:
        """Return how many of so many characters are full."""
        return round(min(max(self.share, 0.0), 1.0) * width)


Cell: TypeAlias = "str | Bar"


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; figures are aligned on the right.

    A terminal that is too narrow leaves out the columns of the highest `rank` first, the last one of a rank first;
    those of rank 0 only where nothing else is left to leave out. The first column always stays, and the second where
    its rank is 0: they say what a row is.
    """

    name: str
    right: bool = False
    rank: int = 0


def columns(*names: str) -> tuple[Column, ...]:
    """Return columns by heading: `columns("model", ">layers", "?>positions", "??>vocabulary")`.

    A leading `>` aligns one on the right; every `?` before it makes it matter less, so that it is left out earlier.
    """
    return tuple(_column(name) for name in names)


def _column(name: str) -> Column:
    rank = len(name) - len(name.lstrip("?"))
    return Column(name[rank:].removeprefix(">"), right=name[rank:].startswith(">"), rank=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under column headings; every row has one cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


def width_of(text: str) -> int:
    """Return the width of a text on a terminal: two for one of East Asia, none for an accent of its own."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(2 if east_asian_width(letter) in "WF" else not combining(letter) for letter in text)


def drop_columns(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return the table without the columns that it has no room for, those first that matter least, and their names."""
    widths = [_least_width(table, index, width) for index in range(len(table.columns))]
    between = gap(width)
    kept = list(range(len(table.columns)))
    stays = 2 if len(kept) > 1 and not table.columns[1].rank else 1
    for index in sorted(kept[stays:], key=lambda index: (table.columns[index].rank, index), reverse=True):
        if sum(widths[column] + between for column in kept) - between <= width:
            break
        kept.remove(index)
    left_out = [column.name for index, column in enumerate(table.columns) if index not in kept]
    rows = [[row[index] for index in kept] for row in table.rows]
    return Table(columns=[table.columns[index] for index in kept], rows=rows, title=table.title), left_out


def gap(width: int) -> int:
    """Return the characters between two columns on a terminal of so many."""
    return 2 if width >= _WIDE else 1


def widths_of(table: Table, width: int) -> list[int]:
    """Return the characters of each column: what it cannot do without, and then what is left, the narrowest first."""
    indices = range(len(table.columns))
    widths = [_least_width(table, index, width) for index in indices]
    wanted = [max(len(table.columns[index].name), *map(_width, _cells(table, index)), 1) for index in indices]
    room = width - sum(widths) - gap(width) * (len(widths) - 1)
    while room > 0 and (hungry := [index for index in indices if widths[index] < wanted[index]]):
        widths[min(hungry, key=widths.__getitem__)] += 1
        room -= 1
    if room < 0:
        widest = max(indices, key=widths.__getitem__)
        widths[widest] = max(1, widths[widest] + room)
    return widths


def _cells(table: Table, index: int) -> list[Cell]:
    return [row[index] for row in table.rows]


def _width(cell: Cell) -> int:
    return cell.width if isinstance(cell, Bar) else width_of(printable(cell))


def _least_width(table: Table, index: int, width: int) -> int:
    """Return the characters that a column cannot do without on a terminal of so many.

    All of its cells, or the longest word of one that is prose.
    """
    name = table.columns[index].name
    cells = _cells(table, index)
    bars = [min(cell.width, LEAST_BAR) for cell in cells if isinstance(cell, Bar)]
    texts = [printable(cell) for cell in cells if not isinstance(cell, Bar)]
    whole = max([len(name), *bars, *map(width_of, texts)])
    if whole <= _PROSE:
        return whole
    word = max((width_of(word) for text in texts for word in text.split()), default=0)
    return min(whole, max([len(name), *bars, min(max(_PROSE, int(_LONGEST_WORD * width)), word)]))
