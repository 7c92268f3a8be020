"""A picture with its words and its numbers, and what all pictures have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from html import escape
from typing import Any

from dsplan.render.table_columns import Table
from hardware_db.records import dataclass

COLOURS = ("#2a7fc1", "#c2571a", "#0b8f6a", "#b3609a", "#b07d12", "#7f7f7f")
"""Told apart by the colour-blind too (after Okabe and Ito), at least 3.6 : 1 on white and on a dark page."""
DASHES = ("solid", "dash", "dot", "dashdot")
LIMIT, QUIET = COLOURS[1], COLOURS[5]
"""Of what must not be passed, or went wrong, and of what is only there to compare with."""
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_MOST_LETTERS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture, a sentence that says what is to be seen, and its numbers for those who cannot see it."""

    name: str
    """One word, for links."""
    title: str
    caption: str
    figure: Mapping[str, Any]
    """What plotly draws: `data` and `layout`."""
    table: Table
    """Without rows where other tables of the page have the numbers."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """What colours mean that the figure itself does not name."""
    signs: Mapping[str, str] = field(default_factory=dict)
    """A letter that looks like the marks or the line of a name in the legend; a square where there is none."""


def to_plotly(figure: Any) -> Mapping[str, Any]:
    """Return a figure of plotly.graph_objects as what plotly draws, without the looks that plotly gives it."""
    figure.update_layout(template="none")
    document = dict(figure.to_plotly_json())
    document["layout"].pop("template", None)
    return document


def templates() -> dict[str, dict[str, Any]]:
    """Return what a page lays over every figure in `light` and in `dark`: its fonts and the colours of text and lines.

    The background is the page's own.
    """
    return {"light": _template("#1f2328", "#d8dee4", "#8c959f"), "dark": _template("#e6edf3", "#30363d", "#848d97")}


def _template(text: str, grid: str, axis: str) -> dict[str, Any]:
    lines = {"gridcolor": grid, "linecolor": axis, "zerolinecolor": axis, "zerolinewidth": 1, "automargin": True}
    bar = {"error_x": {"color": text}, "error_y": {"color": text}}
    return {
        "layout": {
            "font": {"family": FONTS, "size": 13, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(COLOURS),
            "xaxis": lines,
            "yaxis": lines,
            "hoverlabel": {"font": {"family": FONTS, "size": 13}},
        },
        "data": {"bar": [bar], "scatter": [bar]},
    }


def label(text: str) -> str:
    """Return a text that plotly shows as it is: on one line, not longer than a line, without markup."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: _MOST_LETTERS + 1])
    short = f"{line[:_MOST_LETTERS]}…" if len(line) > _MOST_LETTERS else line
    return escape(short, quote=False)


def line_style(index: int) -> dict[str, str]:
    """Return the line of the `index`th of several things: no two of the first 24 are alike."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def thin_out(count: int, most: int) -> Sequence[int]:
    """Return which of `count` rows a table of `most` shows: evenly spread, the first and the last among them."""
    if count <= most:
        return range(count)
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
