"""An answer as blocks, lines of text and tables with bars, and its printing: through rich on a terminal, else plain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from hardware_db.notices import fold_lines, printable
from hardware_db.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

Style: TypeAlias = Literal["", "heading", "good", "warning", "bad", "faint"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A paragraph.

    One of `parts`, each with the column of the table above it that it explains, is without those of columns that a
    terminal leaves out; `text` is all of them.
    """

    text: str
    style: Style = ""
    parts: tuple[tuple[str, str], ...] = ()


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


def explain_columns(parts: Sequence[tuple[str, str]]) -> Text:
    """Return what columns of the table above mean, each as its name and words that begin with it."""
    return Text(text="; ".join(words for _, words in parts), style="faint", parts=tuple(parts))


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


Block: TypeAlias = "Text | Table"


# Blocks as plain ASCII-framed text, for pipes and files.


def plain_text(blocks: Iterable[Block]) -> str:
    """Return the blocks as text that ends in a newline; tables are as wide as their content."""
    return "".join(
        f"{_plain_table(block) if isinstance(block, Table) else printable(block.text)}\n" for block in blocks
    )


def _plain_table(table: Table) -> str:
    cells = [[column.name for column in table.columns], *([_plain_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(_wide(row[index]) for row in cells) for index in range(len(table.columns))]
    lines = [_line(row, widths, table) for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", printable(table.title), *lines] if table.title else lines)


def _line(row: Sequence[str], widths: Sequence[int], table: Table) -> str:
    aligned = []
    for text, width, column in zip(row, widths, table.columns, strict=True):
        space = " " * (width - _wide(text))
        aligned.append(space + text if column.right else text + space)
    return "  ".join(aligned).rstrip()


def _wide(text: str) -> int:
    """Return the width of a text on a terminal: two for one of East Asia, none for an accent of its own."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(2 if east_asian_width(letter) in "WF" else not combining(letter) for letter in text)


def _plain_cell(cell: Cell) -> str:
    if not isinstance(cell, Bar):
        return printable(cell)
    full = cell.count_filled(cell.width)
    return "#" * full + "." * (cell.width - full)


# Progress on a terminal; nothing elsewhere.


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Return a function that shows a line with a spinner on stderr until the block ends.

    Rich is imported with its first line: answers that are at hand neither need it nor wait for it.
    """
    with contextlib.ExitStack() as shown:
        lines: list[Callable[[str], None]] = []

        def report(text: str) -> None:
            if not can_redraw(sys.stderr):
                return
            if not lines:
                lines.append(_spinner(shown, text))
            lines[0](text)

        yield report


def _spinner(shown: contextlib.ExitStack, text: str) -> Callable[[str], None]:
    console = terminal(sys.stderr)
    status = shown.enter_context(console.status(text, spinner="dots" if takes_blocks(console) else "line"))
    return status.update


def show(blocks: Sequence[Block]) -> None:
    """Print blocks to stdout. Rich is imported only for a terminal: a pipe neither needs it nor waits for it."""
    if sys.stdout.isatty():
        print_blocks(blocks)
    else:
        sys.stdout.write(plain_text(blocks))


def room() -> tuple[int, bool]:
    """Return how many columns the standard output has, and whether it takes curves drawn with more than ASCII."""
    if not sys.stdout.isatty():
        return PIPE_WIDTH, False
    console = terminal()
    return console.width, takes_blocks(console)


def say(text: str, *, stderr: bool = False) -> None:
    """Print a sentence, or lines."""
    file = sys.stderr if stderr else sys.stdout
    print(fold_lines("\n".join(map(printable, text.split("\n"))), file), file=file)


def show_file(text: str) -> None:
    """Print a file that is asked for on stdout: whole in a pipe, as far as it is printable on a terminal."""
    sys.stdout.write("".join(map(printable, text.splitlines(keepends=True))) if sys.stdout.isatty() else text)


def show_json(value: object) -> None:
    """Print one JSON document to stdout; a figure that is not a number in JSON's sense is a bug and raises."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


# Blocks on a terminal, through rich.


_STYLES = {"": "", "heading": "bold", "good": "green", "warning": "yellow", "bad": "red", "faint": "dim"}

_WIDE = 100
_PROSE = 24
"""A column with longer cells is prose, and folded between its words."""
_LONGEST_WORD = 0.55
"""Of the terminal's width, within which a longer word, such as a model's name, is not folded."""
_LEAST_BAR = 5
PIPE_WIDTH = 80
"""Columns for curves in a pipe, which has no width of its own."""


def terminal(file: TextIO | None = None) -> Console:
    """Return a file as rich's terminal.

    Rich takes one that can place no cursor for 80 columns wide; here it is as wide as it is.
    """
    from shutil import get_terminal_size

    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if console.is_dumb_terminal:
        width, height = get_terminal_size()
        console.size = console.size._replace(width=width or PIPE_WIDTH, height=height or 25)
    return console


def can_redraw(file: TextIO) -> bool:
    """Return whether a file is a terminal that draws over what it shows."""
    return file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def takes_blocks(console: Console) -> bool:
    """Return whether the terminal's encoding has more than ASCII to draw with."""
    return console.encoding.startswith("utf")


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print to stdout, folded to the terminal's width."""
    console = terminal()
    for drawn in renderables(blocks, console):
        console.print(drawn)


def renderables(
    blocks: Iterable[Block], console: Console, *, names_left_out: bool = True
) -> Iterator[RichTable | RichText]:
    """Return what rich prints of blocks, one under the other.

    Under a table the names of columns that it has no room for.
    """
    from rich.text import Text as RichText

    left_out: list[str] = []
    for block in blocks:
        if not isinstance(block, Table):
            parts = [words for column, words in block.parts if column not in left_out]
            yield RichText(printable("; ".join(parts) or block.text), style=_STYLES[block.style])
            continue
        if block.title:
            yield RichText("")
            yield RichText(printable(block.title), style=_STYLES["heading"])
        shown, left_out = _drop_columns(block, console.width)
        yield _rich_table(shown, console)
        if left_out and names_left_out:
            yield RichText(f"a wider terminal also shows {', '.join(left_out)}", style="dim")


def _drop_columns(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return the table without the columns that it has no room for, those first that matter least, and their names."""
    widths = [_least_width(table, index, width) for index in range(len(table.columns))]
    gap = _gap(width)
    kept = list(range(len(table.columns)))
    stays = 2 if len(kept) > 1 and not table.columns[1].rank else 1
    for index in sorted(kept[stays:], key=lambda index: (table.columns[index].rank, index), reverse=True):
        if sum(widths[column] + gap for column in kept) - gap <= width:
            break
        kept.remove(index)
    left_out = [column.name for index, column in enumerate(table.columns) if index not in kept]
    rows = [[row[index] for index in kept] for row in table.rows]
    return Table(columns=[table.columns[index] for index in kept], rows=rows, title=table.title), left_out


def _gap(width: int) -> int:
    """Return the characters between two columns on a terminal of so many."""
    return 2 if width >= _WIDE else 1


def _widths(table: Table, width: int) -> list[int]:
    """Return the characters of each column: what it cannot do without, and then what is left, the narrowest first."""
    indices = range(len(table.columns))
    widths = [_least_width(table, index, width) for index in indices]
    wanted = [max(len(table.columns[index].name), *map(_width, _cells(table, index)), 1) for index in indices]
    room = width - sum(widths) - _gap(width) * (len(widths) - 1)
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
    return cell.width if isinstance(cell, Bar) else _wide(printable(cell))


def _least_width(table: Table, index: int, width: int) -> int:
    """Return the characters that a column cannot do without on a terminal of so many.

    All of its cells, or the longest word of one that is prose.
    """
    name = table.columns[index].name
    cells = _cells(table, index)
    bars = [min(cell.width, _LEAST_BAR) for cell in cells if isinstance(cell, Bar)]
    texts = [printable(cell) for cell in cells if not isinstance(cell, Bar)]
    whole = max([len(name), *bars, *map(_wide, texts)])
    if whole <= _PROSE:
        return whole
    word = max((_wide(word) for text in texts for word in text.split()), default=0)
    return min(whole, max([len(name), *bars, min(max(_PROSE, int(_LONGEST_WORD * width)), word)]))


def _rich_table(table: Table, console: Console) -> RichTable:
    from rich.box import SIMPLE_HEAD, Box
    from rich.table import Table as RichTable

    unicode = takes_blocks(console)
    drawn = RichTable(
        box=SIMPLE_HEAD if unicode else Box(_ASCII_HEAD, ascii=True),
        padding=(0, _gap(console.width) - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    widths = _widths(table, console.width)
    for column, width in zip(table.columns, widths, strict=True):
        drawn.add_column(column.name, justify="right" if column.right else "left", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(_rich_cell(cell, width, unicode=unicode) for cell, width in zip(row, widths, strict=True)))
    return drawn


_ASCII_HEAD = "    \n    \n -- \n    \n    \n    \n    \n    \n"
"""rich's SIMPLE_HEAD, a rule under the headings."""


def _rich_cell(cell: Cell, width: int, *, unicode: bool) -> RichText | _DrawnBar:
    from rich.text import Text as RichText

    return _DrawnBar(cell, unicode) if isinstance(cell, Bar) else RichText(_break_wide_words(printable(cell), width))


_PART = re.compile(r"[^/_.\-]*[/_.\-]?")


def _break_wide_words(text: str, width: int) -> str:
    """Break words that are too wide for a line, such as a model's name, behind `/`, `-`, `_` or `.`."""
    return re.sub(r"\S+", lambda word: _lines_of(word[0], width) if _wide(word[0]) > width else word[0], text)


def _lines_of(word: str, width: int) -> str:
    lines = [""]
    for part in _PART.findall(word):
        if lines[-1] and _wide(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


class _DrawnBar:
    """A bar as wide as its column, and no wider than it would be."""

    def __init__(self, bar: Bar, unicode: bool) -> None:
        self._bar, self._unicode = bar, unicode

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(min(self._bar.width, _LEAST_BAR), self._bar.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichText]:
        from rich.text import Text as RichText

        bar, width = self._bar, min(self._bar.width, options.max_width)
        full, empty = ("█", "░") if self._unicode else ("#", ".")
        colour = {"below": "green", "near": "yellow", "over": "red"}[bar.state]
        filled = bar.count_filled(width)
        yield RichText(full * filled, style=colour) + RichText(empty * (width - filled), style="dim")
