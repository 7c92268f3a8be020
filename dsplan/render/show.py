"""An answer as blocks, lines of text and tables with bars, and its printing: through rich on a terminal, else plain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from dsplan.render.table_columns import LEAST_BAR, Bar, Cell, Table, drop_columns, gap, width_of, widths_of
from hardware_db.notices import fold_lines, printable
from hardware_db.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

Style: TypeAlias = Literal["", "heading", "good", "warning", "bad", "faint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A paragraph.

    One of `parts`, each with the column of the table above it that it explains, is without those of columns that a
    terminal leaves out; `text` is all of them.
    """

    text: str
    style: Style = ""
    parts: tuple[tuple[str, str], ...] = ()


def explain_columns(parts: Sequence[tuple[str, str]]) -> Text:
    """Return what columns of the table above mean, each as its name and words that begin with it."""
    return Text(text="; ".join(words for _, words in parts), style="faint", parts=tuple(parts))


Block: TypeAlias = "Text | Table"


# Blocks as plain ASCII-framed text, for pipes and files.


def plain_text(blocks: Iterable[Block]) -> str:
    """Return the blocks as text that ends in a newline; tables are as wide as their content."""
    return "".join(
        f"{_plain_table(block) if isinstance(block, Table) else printable(block.text)}\n" for block in blocks
    )


def _plain_table(table: Table) -> str:
    cells = [[column.name for column in table.columns], *([_plain_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(width_of(row[index]) for row in cells) for index in range(len(table.columns))]
    lines = [_line(row, widths, table) for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", printable(table.title), *lines] if table.title else lines)


def _line(row: Sequence[str], widths: Sequence[int], table: Table) -> str:
    aligned = []
    for text, width, column in zip(row, widths, table.columns, strict=True):
        space = " " * (width - width_of(text))
        aligned.append(space + text if column.right else text + space)
    return "  ".join(aligned).rstrip()


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
        shown, left_out = drop_columns(block, console.width)
        yield _rich_table(shown, console)
        if left_out and names_left_out:
            yield RichText(f"a wider terminal also shows {', '.join(left_out)}", style="dim")


def _rich_table(table: Table, console: Console) -> RichTable:
    from rich.box import SIMPLE_HEAD, Box
    from rich.table import Table as RichTable

    unicode = takes_blocks(console)
    drawn = RichTable(
        box=SIMPLE_HEAD if unicode else Box(_ASCII_HEAD, ascii=True),
        padding=(0, gap(console.width) - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    widths = widths_of(table, console.width)
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
    return re.sub(r"\S+", lambda word: _lines_of(word[0], width) if width_of(word[0]) > width else word[0], text)


def _lines_of(word: str, width: int) -> str:
    lines = [""]
    for part in _PART.findall(word):
        if lines[-1] and width_of(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


class _DrawnBar:
    """A bar as wide as its column, and no wider than it would be."""

    def __init__(self, bar: Bar, unicode: bool) -> None:
        self._bar, self._unicode = bar, unicode

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(min(self._bar.width, LEAST_BAR), self._bar.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichText]:
        from rich.text import Text as RichText

        bar, width = self._bar, min(self._bar.width, options.max_width)
        full, empty = ("█", "░") if self._unicode else ("#", ".")
        colour = {"below": "green", "near": "yellow", "over": "red"}[bar.state]
        filled = bar.count_filled(width)
        yield RichText(full * filled, style=colour) + RichText(empty * (width - filled), style="dim")
