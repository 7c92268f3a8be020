"""Bytes of a live engine's tensors by category, beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import psutil
import torch

from hardware_db.units import format_bytes
from planner.types.plan import MemoryEstimate
from strategies.protocols import Observer, TrainingEngine
from strategies.torch_compat.tensors import live_objects, storage_number
from strategies.tracing.storage_tracker import plain_parts

MAPPED_FILES: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Views of files on a disk, by the address of their storage."""


def on_disk(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of such a file, so that the kernel may take its memory back at any time."""
    return tensor.untyped_storage().data_ptr() in MAPPED_FILES


def reachable_tensors() -> list[torch.Tensor]:
    """Return the tensors that Python's garbage collector knows of, and their gradients, which nothing else may hold."""
    tensors = live_objects(torch.Tensor)
    return [*tensors, *(item.grad for item in tensors if item.is_leaf and item.grad is not None)]


STATES = ("parameters", "gradients", "optimizer")
"""What `Engine.state_tensors` tells apart, in the planner's words; a tensor of several counts as the first."""
_LABELS = {"parameters": "weights and buffers", "gradients": "gradients", "optimizer": "masters and optimizer states"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """Bytes of one category on this rank, and the plan's figure where it has one."""

    name: str
    live_bytes: int
    predicted_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The memory of one rank at one moment; printed, it is a table.

    `rows` are categories of tensors on the device, which add up to `live_bytes`; `offloaded_bytes` are states in host
    memory instead, and what is on disk counts nowhere. `peak_bytes` is the largest the live bytes have been, or None if
    nothing counted them (on a CPU only `Engine.memory_timeline` does); `reserved_bytes` the allocator's reservation,
    None on a CPU.
    """

    rank: int
    device: str
    rows: tuple[MemoryRow, ...]
    live_bytes: int
    offloaded_bytes: int
    peak_bytes: int | None
    predicted_peak_bytes: int
    reserved_bytes: int | None
    host_bytes: int

    def __str__(self) -> str:
        lines = [(f"memory of rank {self.rank}, {self.device}", "now", "predicted")]
        lines += [(f"  {row.name}", format_bytes(row.live_bytes), _predicted(row.predicted_bytes)) for row in self.rows]
        lines.append(("all tensors", format_bytes(self.live_bytes), ""))
        peak = "not counted" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        lines.append(("peak", peak, _predicted(self.predicted_peak_bytes)))
        if self.reserved_bytes is not None:
            lines.append(("reserved by the allocator", format_bytes(self.reserved_bytes), ""))
        if self.offloaded_bytes:
            lines.append(("states in host memory", format_bytes(self.offloaded_bytes), ""))
        lines.append(("this process in host memory", format_bytes(self.host_bytes), ""))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {now:>{widths[1]}}  {predicted:>{widths[2]}}".rstrip()
            for name, now, predicted in lines
        )


def memory_report(engine: TrainingEngine) -> MemoryReport:
    """Return the report of this rank; each rank has its own."""
    device = engine.device
    here, elsewhere = state_bytes(engine.state_tensors(), device)
    on_gpu = device.type == "cuda"
    live = torch.cuda.memory_allocated(device) if on_gpu else _bytes(reachable_tensors(), set(), device)[0]
    planned = engine.plan.memory
    rows = [
        MemoryRow(name=_LABELS[name], live_bytes=here[name], predicted_bytes=_state(planned, name)) for name in STATES
    ]
    rows.append(MemoryRow(name="other tensors", live_bytes=max(0, live - sum(here.values()))))
    return MemoryReport(
        rank=engine.environment.rank,
        device=str(device),
        rows=tuple(rows),
        live_bytes=max(live, sum(here.values())),
        offloaded_bytes=elsewhere,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else engine.counted_peak_bytes,
        predicted_peak_bytes=planned.peak_allocated_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device) if on_gpu else None,
        host_bytes=psutil.Process().memory_info().rss,
    )


def state_bytes(tensors: Mapping[str, Iterable[torch.Tensor]], device: torch.device) -> tuple[dict[str, int], int]:
    """Return bytes per category on the device, and those of all that are elsewhere; each storage counts once."""
    seen: set[int] = set()
    here: dict[str, int] = {}
    elsewhere = 0
    for name in STATES:
        here[name], rest = _bytes(tensors[name], seen, device)
        elsewhere += rest
    return here, elsewhere


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int], device: torch.device) -> tuple[int, int]:
    """Count bytes of storages that were not seen before, on the device and elsewhere."""
    here = elsewhere = 0
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            number = storage_number(part)
            if storage.device.type == "meta" or number in seen or on_disk(part):
                continue
            seen.add(number)
            if storage.device.type == device.type:
                here += storage.nbytes()
            else:
                elsewhere += storage.nbytes()
    return here, elsewhere


def _state(planned: MemoryEstimate, name: str) -> int:
    """Return the plan's figure for a resident state; plans of older files have only those alive at the peak."""
    at_peak: int = getattr(planned, f"{name}_bytes")
    return planned.states.get(f"{name}_bytes", at_peak)


def _predicted(count_bytes: int | None) -> str:
    return "" if count_bytes is None else format_bytes(count_bytes)


class MemoryPrinter(Observer):
    """Prints rank 0's report every few steps, as the config's `memory_breakdown` asks."""

    def __init__(self, engine: TrainingEngine, *, every: int) -> None:
        self._engine, self._every = engine, every
        self._steps = 0

    def step_ended(self) -> None:
        """Print the report of every `every`th step."""
        self._steps += 1
        if self._engine.is_main and self._steps % self._every == 0:
            print(memory_report(self._engine), flush=True)
