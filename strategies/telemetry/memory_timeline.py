"""The live bytes of a step as it proceeds, counted on this rank and drawn by `planner.emit.memory_picture`."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hardware_db.files import replace_whole
from planner.emit.memory_picture import LAYERS, Mark, Sample, Timeline, draw
from strategies.errors import BrokenFile
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.memory_report import STATES, on_disk, reachable_tensors
from strategies.tracing.storage_tracker import StorageTracker, plain_parts

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

    def _observe(self, tensor: torch.Tensor, *, was_alive: bool, is_written: bool = False) -> None:
        if all(part.device.type == self._device.type and not on_disk(part) for part in plain_parts(tensor)):
            super()._observe(tensor, was_alive=was_alive, is_written=is_written)

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
