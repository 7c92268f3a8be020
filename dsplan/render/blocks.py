"""What an answer is made of before anyone decides how it looks: lines of text and tables with bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Style: TypeAlias = Literal["", "heading", "good", "warning", "bad", "faint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A share between 0 and 1, drawn `width` characters wide; above 1 it is drawn full."""

    share: float
    width: int = 10

    @property
    def filled(self) -> int:
        return round(min(max(self.share, 0.0), 1.0) * self.width)


Cell: TypeAlias = "str | Bar"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; figures are aligned on the right, and a narrow terminal leaves optional columns out."""

    name: str
    right: bool = False
    optional: bool = False


def columns(*names: str) -> tuple[Column, ...]:
    """Columns by heading; a leading `>` aligns one on the right, a leading `?` makes it optional: `columns("model",
    ">layers", "?>positions")`."""
    return tuple(Column(name.lstrip("?>"), right=">" in name[:2], optional=name.startswith("?")) for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under column headings; every row has one cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


Block: TypeAlias = "Text | Table"
