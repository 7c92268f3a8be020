"""The memory of a step as it proceeds: an SVG picture of live bytes over time, by when each tensor was made.

What lives before the picture begins is told apart as weights, gradients, optimizer states and others; what is made
after that by the section that made it, so that forward's area is activations and backward's is gradients and
temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hardware_db.records import dataclass
from hardware_db.units import format_bytes, format_seconds

LAYERS = ("weights and buffers", "gradients", "optimizer states", "other tensors", "forward", "backward", "step")
"""From the bottom up: what was there before, then what each section made."""
_COLOURS = ("#3b6ea5", "#c9703a", "#6a9a5b", "#b8b8b8", "#e3b23c", "#b5524f", "#8a6bb0")
_WIDTH, _HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 50, 90
_LABEL = 60
_COLUMNS = 600
"""A column of the picture shows the largest of its moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Live bytes of every layer at one moment."""

    seconds: float
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A section begins."""

    seconds: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Content of a picture; there is at least one sample."""

    title: str
    samples: Sequence[Sample]
    marks: Sequence[Mark]
    predicted_peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Turns seconds and bytes into places in the picture."""

    seconds: float
    count_bytes: int

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.seconds

    def y(self, count_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * count_bytes / self.count_bytes


def draw(timeline: Timeline) -> str:
    """Return the picture as a self-contained SVG file."""
    peak = max(sum(sample.layers) for sample in timeline.samples)
    scale = _Scale(
        seconds=max(timeline.samples[-1].seconds, 1e-9),
        count_bytes=max(1, peak, timeline.predicted_peak_bytes) * 11 // 10 + 1,
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, timeline.title, size=15),
        _text(_LEFT, 40, f"peak {format_bytes(peak)}, predicted {format_bytes(timeline.predicted_peak_bytes)}"),
        *_axes(scale),
        *_areas(_columns(timeline.samples, scale), scale),
        *_sections(timeline.marks, scale),
        _line(timeline.predicted_peak_bytes, scale, "predicted peak"),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _columns(samples: Sequence[Sample], scale: _Scale) -> list[Sample]:
    """Return a sample per column of the picture: the largest of its moments, or the last one's if nothing changed."""
    columns: list[Sample] = []
    index, last = 0, samples[0].layers
    for column in range(_COLUMNS):
        end = scale.seconds * (column + 1) / _COLUMNS
        inside = [last]
        while index < len(samples) and samples[index].seconds <= end:
            inside.append(samples[index].layers)
            index += 1
        last = inside[-1]
        columns.append(Sample(seconds=end, layers=max(inside, key=sum)))
    return columns


def _areas(columns: Sequence[Sample], scale: _Scale) -> list[str]:
    areas = []
    below = [0] * len(columns)
    for index, colour in enumerate(_COLOURS):
        above = [base + column.layers[index] for base, column in zip(below, columns, strict=True)]
        if above != below:
            edge = [*zip(columns, above, strict=True), *reversed(list(zip(columns, below, strict=True)))]
            points = " ".join(f"{scale.x(column.seconds):.1f},{scale.y(level):.1f}" for column, level in edge)
            largest = max(column.layers[index] for column in columns)
            title = f"<title>{LAYERS[index]}: at most {format_bytes(largest)}</title>"
            areas.append(f'<polygon points="{points}" fill="{colour}">{title}</polygon>')
        below = above
    return areas


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for quarter in range(5):
        level = scale.count_bytes * quarter / 4
        y = scale.y(level)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, format_bytes(level), anchor="end"))
        seconds = scale.seconds * quarter / 4
        parts.append(_text(scale.x(seconds), _HEIGHT - _BOTTOM + 18, format_seconds(seconds), anchor="middle"))
    return parts


def _sections(marks: Sequence[Mark], scale: _Scale) -> list[str]:
    parts = []
    rows = {name: row for row, name in enumerate(dict.fromkeys(mark.name for mark in marks))}
    free_from = dict.fromkeys(rows, 0.0)
    for mark in marks:
        x = scale.x(mark.seconds)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#555555"'
            f' stroke-dasharray="2 4"/>'
        )
        if x >= free_from[mark.name]:  # of many micro-batches not every one can be named
            parts.append(_text(x + 3, _TOP + 12 + 14 * rows[mark.name], mark.name))
            free_from[mark.name] = x + _LABEL
    return parts


def _line(level: int, scale: _Scale, name: str) -> str:
    y = scale.y(level)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-dasharray="6 4">'
        f"<title>{name}: {format_bytes(level)}</title></line>"
    )


def _legend() -> list[str]:
    parts = []
    for index, (layer, colour) in enumerate(zip(LAYERS, _COLOURS, strict=True)):
        x, y = _LEFT + 210 * (index % 4), _HEIGHT - 48 + 22 * (index // 4)
        label = layer if index < 4 else f"made in {layer}"
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, y, label))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
