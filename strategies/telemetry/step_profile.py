"""Some steps of a run as files that viewers open, per rank: a Chrome trace and a memory snapshot.

`dsplan run --profile` asks for them. On a GPU torch records both in the same steps. On a CPU no allocator keeps a
history, and counting tensors in Python slows a step down: there the trace is of the steps that were asked for, and
memory of the one after them.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from hardware_db.files import replacement
from hardware_db.notices import notice
from planner.emit.viewers import snapshot_block, snapshot_event, snapshot_of, snapshot_segment
from strategies.run_directory.files import profile_paths
from strategies.telemetry.memory_report import on_disk, reachable_tensors
from strategies.telemetry.traces import StepProfile, profile_of
from strategies.torch_compat.profiling import dump_memory_history, record_memory_history
from strategies.torch_compat.tensors import live_objects
from strategies.tracing.storage_tracker import StorageTracker, plain_parts
from strategies.variables import PROFILE

_MOST_FRAMES = 30
_MOST_EVENTS = 1_000_000
"""Of a GPU's allocator; older ones are dropped."""


class RunProfile:
    """Profiles steps `first` to `last` of a run once. Steps count from 1 over all attempts."""

    def __init__(self, directory: Path, rank: int, device: torch.device, first: int, last: int) -> None:
        self._rank, self._device, self._first, self._last = rank, device, first, last
        self._trace_path, self._memory_path = profile_paths(directory, rank)
        self._trace: torch.profiler.profile | None = None
        self._step: record_function | None = None
        self._tracker: SnapshotTracker | None = None
        self._has_begun = self._is_done = False

    @classmethod
    def from_environment(cls, directory: Path, rank: int, device: torch.device) -> RunProfile | None:
        """Read what `dsplan run --profile` has left in the environment; None where it was not asked for."""
        first, _, last = os.environ.get(PROFILE, "").partition(":")
        return cls(directory, rank, device, int(first), int(last)) if first else None

    def step_begins(self, number: int) -> bool:
        """Begin to watch where it is time to; return whether the step is watched, and therefore slow."""
        if self._is_done:
            return False
        if number == self._first and not self._has_begun:
            self._begin()
        if self._has_begun and self._first <= number <= self._last and self._trace is not None:
            self._step = record_function(f"step {number}")
            self._step.__enter__()  # type: ignore[no-untyped-call]
        return self._has_begun

    def step_ended(self, number: int) -> None:
        """Write what was watched where it is over."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._is_done or not self._has_begun or number < self._last:
            return
        if self._tracker is None:
            self._end_trace()
            if self._device.type == "cuda":
                self._write(self._memory_path, dump_memory_history)
                self._is_done = True
            else:
                self._tracker = SnapshotTracker()
                self._tracker.__enter__()
        else:
            tracker, self._tracker, self._is_done = self._tracker, None, True
            tracker.__exit__(None, None, None)
            self._write(self._memory_path, lambda path: path.write_bytes(tracker.snapshot()))

    def close(self) -> None:
        """End the run; say so where that came before what was asked for."""
        if self._is_done:
            return
        self._is_done = True
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._end_trace()
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
        if self._rank == 0:
            steps = f"{self._first}" if self._first == self._last else f"{self._first}:{self._last}"
            lacks = f"no step {self._last}"
            if not self._has_begun:
                lacks = f"no step {self._first}"
            elif self._device.type != "cuda":
                lacks = f"no step after {self._last} to count memory in"
            notice(f"--profile {steps}: these ranks ran {lacks}")

    def _begin(self) -> None:
        self._has_begun = True
        if self._device.type == "cuda":
            record_memory_history(self._device, _MOST_EVENTS)
        if not StepProfile.is_possible():
            if self._rank == 0:
                notice("--profile: the script's own profiler runs in these steps, so that there is no trace of them")
            return
        self._trace = profile_of(self._device, record_shapes=True)
        self._trace.start()

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            trace.stop()
            self._write(self._trace_path, lambda path: _write_trace(trace, path))

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        try:
            with replacement(path) as temporary:
                write(temporary)
        except OSError as problem:
            notice(f"{path}: {problem.strerror}; the run goes on without it")


def _write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write the trace with numbers for processes and threads, as its format has them; torch gives names to some."""
    profile.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(errors="replace"))
    numbers: dict[tuple[str, str], int] = {}
    for event in trace["traceEvents"]:
        for key in ("pid", "tid"):
            word = event.get(key, 0)
            if not isinstance(word, int):
                event[key] = numbers.setdefault((key, str(word)), 1_000_000_000 + len(numbers))
    trace["traceEvents"] += [
        {"ph": "M", "ts": 0, "pid": number, "tid": 0, "name": "process_name", "args": {"name": word}}
        for (key, word), number in numbers.items()
        if key == "pid"
    ]
    path.write_text(json.dumps(trace))


class SnapshotTracker(StorageTracker):
    """A storage tracker that notes when every storage in host memory came and went, and the code that made it."""

    def __init__(self) -> None:
        self._events: list[tuple[int, bool, int, int, tuple[Any, ...]]] = []
        self._known: dict[weakref.ref[torch.UntypedStorage], tuple[int, int, tuple[Any, ...]]] = {}
        self._frames: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._number = 0
        self._kind = ""
        self._operation = ""
        self._began = time.perf_counter()
        gc.collect()
        super().__init__()
        for self._kind, tensors in _standing():
            for tensor in tensors:
                self._observe(tensor, was_alive=True)
        self._kind = ""
        self._began = time.perf_counter()

    def snapshot(self) -> bytes:
        """Return what was noted, in the form of `torch.cuda.memory._snapshot()`.

        A CPU's allocator places storages anywhere; in the file each has the first gap that is large enough.
        """
        gaps = _Gaps()
        addresses: dict[int, int] = {}
        trace = []
        for microseconds, comes, number, size, frames in sorted(self._events, key=lambda event: event[:1]):
            if comes:
                addresses[number] = gaps.take(size)
                trace.append(snapshot_event("alloc", addresses[number], size, microseconds, frames))
            else:
                address = addresses.pop(number)
                gaps.give(address, size)
                for action in ("free_requested", "free_completed"):
                    trace.append(snapshot_event(action, address, size, microseconds, frames))
        storages = {number: (size, frames) for _, comes, number, size, frames in self._events if comes}
        blocks = [
            snapshot_block(address, *storages[number])
            for number, address in sorted(addresses.items(), key=lambda item: item[1])
        ]
        about = ({"name": "host memory of tensors", "filename": "counted by dsplan", "line": 0},)
        segment = snapshot_segment(gaps.base, gaps.size, blocks, about)
        return pickle.dumps(snapshot_of([segment], trace), protocol=4)

    def _runs(self, operation: Any) -> None:
        self._operation = str(operation)

    def _observe(self, tensor: torch.Tensor, *, was_alive: bool, is_written: bool = False) -> None:
        if all(part.device.type == "cpu" and not on_disk(part) for part in plain_parts(tensor)):
            super()._observe(tensor, was_alive=was_alive, is_written=is_written)

    def _measure(self, storage: torch.UntypedStorage, *, raises_past_peak: bool = False) -> None:
        super()._measure(storage, raises_past_peak=raises_past_peak)
        reference = weakref.ref(storage, self._forget)
        size = self._sizes[reference]
        number, before, frames = self._known.get(reference, (0, 0, ()))
        if size == before:
            if reference not in self._known:
                self._known[reference] = (0, 0, ())
            return
        now = self._now()
        if before:
            self._events.append((now, False, number, before, frames))
        self._number += 1
        # What was there all along and is met only now was there from the beginning.
        frames = self._stack("other tensors" if raises_past_peak and not self._kind else self._kind)
        if size:
            self._events.append((0 if raises_past_peak else now, True, self._number, size, frames))
        # Writing to a key that is there keeps the reference that was made first, which is the one that is called back.
        self._known[reference] = (self._number, size, frames)

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        number, size, frames = self._known.pop(reference, (0, 0, ()))
        if size:
            self._events.append((self._now(), False, number, size, frames))

    def _now(self) -> int:
        """Return microseconds since the step began, 0 before it."""
        return 0 if self._kind else 1 + round((time.perf_counter() - self._began) * 1e6)

    def _stack(self, kind: str) -> tuple[dict[str, Any], ...]:
        """Return the code that runs, innermost first, as a snapshot has it; of what was there before its kind."""
        if kind:
            return (self._frame(kind, "there before the step", 0),)
        frames = [self._frame(self._operation, "operation", 0)]
        frame = sys._getframe(2)
        while frame is not None and len(frames) < _MOST_FRAMES:
            code = frame.f_code
            if code.co_filename not in _OWN_FILES:
                frames.append(self._frame(code.co_name, code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(frames)

    def _frame(self, name: str, filename: str, line: int) -> dict[str, Any]:
        return self._frames.setdefault((name, filename, line), {"name": name, "filename": filename, "line": line})


_OWN_FILES = (__file__, sys.modules[StorageTracker.__module__].__file__)


def _standing() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the tensors there are by what they are; a tensor of several kinds counts as the first."""
    every = reachable_tensors()
    weights: list[torch.Tensor] = [tensor for tensor in every if isinstance(tensor, torch.nn.Parameter)]
    yield "weights", weights
    yield "gradients", [weight.grad for weight in weights if weight.grad is not None]
    states = [state for optimizer in live_objects(torch.optim.Optimizer) for state in optimizer.state.values()]
    values = (value for state in states if isinstance(state, dict) for value in state.values())
    yield "optimizer states", [value for value in values if torch.is_tensor(value)]
    yield "other tensors", every


class _Gaps:
    """Addresses in one range that grows at its end, first fit."""

    base = 1 << 40

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        for index, (address, length) in enumerate(self._free):
            if length >= size:
                rest = [(address + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                return address
        address = self.base + self.size
        if self._free and sum(self._free[-1]) == address:
            address = self._free.pop()[0]
        self.size = address + size - self.base
        return address

    def give(self, address: int, size: int) -> None:
        index = bisect_left(self._free, (address, 0))
        if index < len(self._free) and self._free[index][0] == address + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == address:
            index -= 1
            address, length = self._free.pop(index)
            size += length
        insort(self._free, (address, size))
