"""A prediction as files that viewers open: Chrome traces for Perfetto, memory snapshots for pytorch.org/memory_viz."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardware_db.records import dataclass
from planner.cost.memory.estimate import phases_of
from planner.cost.timing.timeline import Span, step_timeline
from planner.types.job import Job
from planner.types.plan import MemoryEstimate

_THREADS: Mapping[str, int] = {"compute": 1, "communication": 2, "transfer": 3}
_MICRO = 1e6
_PAGE = 1 << 21


def chrome_trace(job: Job, memory: MemoryEstimate) -> str:
    """Return the predicted step of the busiest rank as JSON that Perfetto and chrome://tracing open.

    It has a thread for each stream, and a counter of the memory by category. Times are microseconds.

    Format: "Trace Event Format", the Chromium project; X are spans, M names, C counters.
    """
    spans = step_timeline(job)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "busiest rank, predicted by dsplan"}}
    ]
    used = [stream for stream in _THREADS if any(span.stream == stream for span in spans)]
    events += [
        {"ph": "M", "pid": 0, "tid": _THREADS[stream], "name": "thread_name", "args": {"name": stream}}
        for stream in used
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": _THREADS[span.stream],
            "name": span.name or span.kind,
            "cat": span.kind,
            "ts": span.start * _MICRO,
            "dur": span.seconds * _MICRO,
            "args": {"exposed_us": span.exposed * _MICRO} if span.stream == "communication" else {},
        }
        for span in spans
    ]
    for moment in _moments(job, memory, spans):
        args = {name: size for name, size in moment.sizes.items() if size}
        events.append(
            {"ph": "C", "pid": 0, "tid": 0, "name": "bytes", "ts": moment.seconds * _MICRO, "args": args or {"none": 0}}
        )
    about = {"model": job.facts.name, "strategy": job.configuration.strategy, "device": job.cluster.device.name}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def memory_snapshot(job: Job, memory: MemoryEstimate) -> bytes:
    """Return the predicted memory of the busiest rank from loading to the end of a step, pickled.

    It has the form of `torch.cuda.memory._snapshot()`, which pytorch.org/memory_viz and `torch.cuda._memory_viz` open.

    Each category of each phase is a block, whose stack says what it is; a category has a segment as large as its
    largest phase.
    """
    moments = list(_moments(job, memory, step_timeline(job)))
    categories = [name for name in moments[0].sizes if any(moment.sizes[name] for moment in moments)]
    trace: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    address = 1 << 40
    homes = {}
    for name in categories:
        most = max(moment.sizes[name] for moment in moments)
        homes[name] = _Home(name, address, -(-most // _PAGE) * _PAGE)
        address += homes[name].size + _PAGE
    for moment in moments:
        for name in categories:  # what shrinks first, so that no sum is larger than a phase's
            trace += homes[name].freed(moment.sizes[name], moment)
        for name in categories:
            trace += homes[name].grown(moment.sizes[name], moment)
    segments = [home.segment() for home in homes.values()]
    return pickle.dumps(snapshot_of(segments, trace), protocol=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """Memory at the end of a phase, bytes by category."""

    phase: str
    seconds: float
    sizes: Mapping[str, int]


def _moments(job: Job, memory: MemoryEstimate, spans: tuple[Span, ...]) -> Iterator[_Moment]:
    """Yield the phases in the order of a step. Where memory was traced, activations take what the closed form lacks."""
    ends = {kind: min((span.end for span in spans if span.kind == kind), default=0.0) for kind in ("forward",)}
    backward = [span.end for span in spans if span.kind == "backward"]
    optimizer = [span.start for span in spans if span.kind == "optimizer"]
    end = max(span.end for span in spans)
    ends |= {"load": 0.0, "loss": ends["forward"], "backward": min(backward, default=end)}
    ends |= {"step": max(optimizer, default=end)}
    for phase, ledger in phases_of(job).items():
        if phase not in ends:
            continue  # evaluation and saving are no part of a step
        sizes = ledger.rounded()
        sizes["activations"] = max(
            0, sizes["activations"] + memory.phases.get(phase, sum(sizes.values())) - sum(sizes.values())
        )
        yield _Moment(phase=phase, seconds=ends[phase], sizes=sizes)


class _Home:
    """The segment of a category, and the blocks in it: a stack that grows and shrinks at its end."""

    def __init__(self, name: str, address: int, size: int) -> None:
        self.name, self.address, self.size = name, address, size
        self._blocks: list[tuple[int, int, str]] = []

    @property
    def _end(self) -> int:
        return sum(size for _, size, _ in self._blocks)

    def freed(self, size: int, moment: _Moment) -> Iterator[dict[str, Any]]:
        """Yield the events after which the blocks take so many bytes at most."""
        time = round(moment.seconds * _MICRO)
        while self._end > size:
            address, length, phase = self._blocks.pop()
            for action in ("free_requested", "free_completed"):
                yield snapshot_event(action, address, length, time, _frames(f"{self.name} ({phase})"))

    def grown(self, size: int, moment: _Moment) -> Iterator[dict[str, Any]]:
        """Yield the event after which the blocks take so many bytes."""
        if size > self._end:
            address, length = self.address + self._end, size - self._end
            self._blocks.append((address, length, moment.phase))
            time, frames = round(moment.seconds * _MICRO), _frames(f"{self.name} ({moment.phase})")
            yield snapshot_event("alloc", address, length, time, frames)

    def segment(self) -> dict[str, Any]:
        """Return the segment as it is in the end."""
        blocks = [
            snapshot_block(address, size, _frames(f"{self.name} ({phase})")) for address, size, phase in self._blocks
        ]
        return snapshot_segment(self.address, self.size, blocks, _frames(f"segment of {self.name}"))


def _frames(name: str) -> Frames:
    return ({"name": name, "filename": "predicted by dsplan", "line": 0},)


# The form of a snapshot: torch/cuda/memory.py and torch/cuda/_memory_viz.py of torch 2.13.


Frames = Sequence[Mapping[str, Any]]
"""The code that asked for memory, innermost first: `name`, `filename` and `line` each."""
_POOL = (0, 0)


def snapshot_of(segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `torch.cuda.memory._snapshot()` returns for one device. The segments are there from the beginning."""
    began = [
        snapshot_event("segment_alloc", segment["address"], segment["total_size"], 0, segment["frames"])
        for segment in segments
    ]
    return {"segments": list(segments), "device_traces": [[*began, *trace]], "external_annotations": []}


def snapshot_event(action: str, address: int, size: int, microseconds: int, frames: Frames) -> dict[str, Any]:
    """Return a moment at which memory was taken or given back; `action` is a word of torch's."""
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": microseconds,
        "frames": list(frames),
        "segment_pool_id": _POOL,
    }


def snapshot_block(address: int, size: int, frames: Frames, state: str = "active_allocated") -> dict[str, Any]:
    """Memory that is in use in the end."""
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def snapshot_segment(address: int, size: int, blocks: Sequence[Mapping[str, Any]], frames: Frames) -> dict[str, Any]:
    """Return a range of `size` bytes with the blocks in it, by address; what is between them is not in use."""
    used, end, every = sum(block["size"] for block in blocks), address, []
    for block in blocks:
        if block["address"] > end:
            every.append(snapshot_block(end, block["address"] - end, (), "inactive"))
        every.append(dict(block))
        end = block["address"] + block["size"]
    if address + size > end:
        every.append(snapshot_block(end, address + size - end, (), "inactive"))
    return {
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "device": 0,
        "segment_type": "large",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": list(frames),
        "blocks": every,
    }
