"""The memory of a step as it goes on: a picture of live bytes over time, by when each tensor was made.

What lives before the picture begins is told apart as weights, gradients, optimizer states and others; what is made
after that by the section that made it, so that forward's area is activations and backward's is gradients and
temporaries.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from planner.models.storage_tracker import StorageTracker, plain_parts
from strategies.errors import BrokenFile
from strategies.memory_report import STATES
from strategies.observer import Observer
from strategies.reachable import reachable_tensors
from strategies.timeline_svg import LAYERS, Mark, Sample, Timeline, draw
from strategies.zero.swap_file import on_disk

if TYPE_CHECKING:
    from strategies.base import Engine


class TimelineTracker(StorageTracker):
    """A storage tracker that notes every change of the live bytes of a device, by layer."""

    def __init__(self, engine: Engine) -> None:
        self._device = engine.device
        self._layer = "other tensors"
        self._layer_of: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._live = [0] * len(LAYERS)
        self._began = time.perf_counter()
        self.samples: list[Sample] = []
        super().__init__()
        states = engine.state_tensors()
        for layer, name in zip(LAYERS, STATES, strict=False):
            self._layer = layer
            for tensor in states[name]:
                self._observe(tensor, was_alive=True)
        self._layer = "other tensors"
        for tensor in reachable_tensors():
            self._observe(tensor, was_alive=True)
        self.samples.clear()
        self._note()

    def enter(self, section: str) -> Mark:
        """From now on what is made belongs to a section."""
        self._layer = section if section in LAYERS else "other tensors"
        return Mark(seconds=time.perf_counter() - self._began, name=section)

    def _observe(self, tensor: torch.Tensor, *, was_alive: bool) -> None:
        if all(part.device.type == self._device.type and not on_disk(part) for part in plain_parts(tensor)):
            super()._observe(tensor, was_alive=was_alive)

    def _measure(self, storage: torch.UntypedStorage, *, raises_past_peak: bool = False) -> None:
        if storage.device.type != self._device.type:
            return
        before = self.live_bytes
        super()._measure(storage, raises_past_peak=raises_past_peak)
        reference = weakref.ref(storage)
        layer = self._layer_of.setdefault(reference, LAYERS.index(self._layer))
        if self.live_bytes != before:
            self._live[layer] += self.live_bytes - before
            self._note()

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        before = self.live_bytes
        super()._died(reference)
        layer = self._layer_of.pop(reference, None)
        if layer is not None and self.live_bytes != before:
            self._live[layer] += self.live_bytes - before
            self._note()

    def _note(self) -> None:
        self.samples.append(Sample(seconds=time.perf_counter() - self._began, layers=tuple(self._live)))


class _Sections(Observer):
    """Tells the tracker which section runs."""

    def __init__(self, tracker: TimelineTracker) -> None:
        self._tracker = tracker
        self.marks: list[Mark] = []

    def starts(self, section: str) -> None:
        self.marks.append(self._tracker.enter(section))

    def ends(self, section: str) -> None:
        self._tracker.enter("other tensors")


@contextmanager
def memory_timeline(engine: Engine, path: str | Path) -> Iterator[None]:
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
    engine.counted_peak_bytes = max(tracker.peak_bytes, engine.counted_peak_bytes or 0)
    chosen = engine.configuration
    place = f"rank {engine.environment.rank} of {engine.environment.world_size}"
    picture = draw(
        Timeline(
            title=f"{engine.plan.model.get('name')}, {chosen.strategy} ({chosen.backend}), {place}",
            samples=tuple(tracker.samples),
            marks=tuple(sections.marks),
            predicted_peak_bytes=engine.plan.memory.peak_allocated_bytes,
        )
    )
    _replace(Path(path), picture)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as problem:
        raise BrokenFile(path, f"cannot be written ({problem.strerror})", "name another file") from None
