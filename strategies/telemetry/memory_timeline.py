"""The memory of a step as it proceeds: an SVG picture of live bytes over time, by when each tensor was made.

What lives before the picture begins is told apart as weights, gradients, optimizer states and others; what is made
after that by the section that made it, so that forward's area is activations and backward's is gradients and
temporaries.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from hardware_db.files import replace_whole
from hardware_db.units import format_bytes, format_seconds
from strategies.errors import BrokenFile
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.memory_report import STATES, on_disk, reachable_tensors
from strategies.tracing.storage_tracker import StorageTracker, plain_parts

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


_OTHER = LAYERS.index("other tensors")


class TimelineTracker(StorageTracker):
    """A storage tracker that notes every change of the live bytes of a device, by layer."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._device = engine.device
        self._layer = LAYERS[_OTHER]
        self._layers: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}  # layer and bytes
        self._live = [0] * len(LAYERS)
        self._has_begun = False
        self._began = time.perf_counter()
        self._samples: list[Sample] = []
        self._met_late: list[tuple[int, int]] = []  # at which sample, and bytes
        super().__init__()
        states = engine.state_tensors()
        for layer, name in zip(LAYERS, STATES, strict=False):
            self._layer = layer
            for tensor in states[name]:
                self._observe(tensor, was_alive=True)
        self._layer = LAYERS[_OTHER]
        for tensor in reachable_tensors():
            self._observe(tensor, was_alive=True)
        self._samples.clear()
        self._has_begun, self._began = True, time.perf_counter()
        self._note()

    def samples(self) -> tuple[Sample, ...]:
        """Return the live bytes at every moment at which they changed."""
        late = list(self._met_late)
        raised: list[Sample] = []
        added = 0
        for index, sample in reversed(list(enumerate(self._samples))):
            while late and late[-1][0] > index:
                added += late.pop()[1]
            layers = (*sample.layers[:_OTHER], sample.layers[_OTHER] + added, *sample.layers[_OTHER + 1 :])
            raised.append(Sample(seconds=sample.seconds, layers=layers))
        return tuple(reversed(raised))

    def enter(self, section: str) -> Mark:
        """Count what is made from now on to a section."""
        self._layer = section if section in LAYERS else LAYERS[_OTHER]
        return Mark(seconds=time.perf_counter() - self._began, name=section)

    def _observe(self, tensor: torch.Tensor, *, was_alive: bool) -> None:
        if all(part.device.type == self._device.type and not on_disk(part) for part in plain_parts(tensor)):
            super()._observe(tensor, was_alive=was_alive)

    def _measure(self, storage: torch.UntypedStorage, *, raises_past_peak: bool = False) -> None:
        if storage.device.type != self._device.type:
            return
        super()._measure(storage, raises_past_peak=raises_past_peak)
        reference = weakref.ref(storage, self._forget)
        # What was there all along and is met only now belongs to every moment so far.
        is_late = raises_past_peak and self._has_begun
        present = _OTHER if is_late else LAYERS.index(self._layer)
        layer, before = self._layers.get(reference, (present, 0))
        size = self._sizes[reference]
        if is_late:
            self._met_late.append((len(self._samples), size))
        # Writing to a key that is there keeps the reference that was made first, which is the one that is called back.
        self._layers[reference] = (layer, size)
        self._change(layer, size - before)

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        layer, size = self._layers.pop(reference, (0, 0))
        self._change(layer, -size)

    def _change(self, layer: int, added: int) -> None:
        if added:
            self._live[layer] += added
            self._note()

    def _note(self) -> None:
        self._samples.append(Sample(seconds=time.perf_counter() - self._began, layers=tuple(self._live)))


class _Sections(Observer):
    """Reports to the tracker which section runs."""

    def __init__(self, tracker: TimelineTracker) -> None:
        self._tracker = tracker
        self.marks: list[Mark] = []

    def starts(self, section: str) -> None:
        self.marks.append(self._tracker.enter(section))

    def ends(self, section: str) -> None:
        self._tracker.enter(LAYERS[_OTHER])


@contextmanager
def memory_timeline(engine: TrainingEngine, path: str | Path) -> Iterator[None]:
    """Write the picture of what happens inside; counting every tensor slows that down.

    Raises:
        BrokenFile: the picture cannot be written.
    """
    gc.collect()
    tracker = TimelineTracker(engine)
    sections = _Sections(tracker)
    engine.observers.append(sections)
    try:
        with tracker:
            yield
    finally:
        engine.observers.remove(sections)
    chosen = engine.configuration
    samples = tracker.samples()
    engine.counted_peak_bytes = max(sum(sample.layers) for sample in samples)
    rank = f"rank {engine.environment.rank} of {engine.environment.world_size}"
    picture = draw(
        Timeline(
            title=f"{engine.plan.model.get('name')}, {chosen.strategy} ({chosen.backend}), {rank}",
            samples=samples,
            marks=tuple(sections.marks),
            predicted_peak_bytes=engine.plan.memory.peak_allocated_bytes,
        )
    )
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(file, picture)
    except OSError as problem:
        raise BrokenFile(file, f"cannot be written ({problem.strerror})", "name another file") from None
