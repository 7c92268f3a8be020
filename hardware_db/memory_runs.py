"""MemoryRun: what one configuration of one model needed on a real device, as a row of `measurements/memory_*.csv`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hardware_db.run_rows import SHIPPED, RunRow, read_rows, write_rows

__all__ = ["SHIPPED", "MemoryRun", "read_memory_runs", "write_memory_runs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRun(RunRow):
    """A run with the bytes of its busiest rank.

    A phase's bytes are the allocator's peak in it (on a CPU the tensors alive, those that were offloaded too),
    `device_used_bytes` is a process's share of what the driver showed beyond what was used before, `context_bytes` the
    same before the first tensor; 0 where nothing was measured.
    """

    KIND: ClassVar[str] = "memory run"
    MEASURED: ClassVar[tuple[str, ...]] = (
        *("resident_bytes", "forward_bytes", "loss_bytes", "backward_bytes", "step_bytes"),
        *("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "context_bytes", "host_bytes"),
    )

    resident_bytes: int = 0
    forward_bytes: int = 0
    loss_bytes: int = 0
    backward_bytes: int = 0
    step_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    device_used_bytes: int = 0
    context_bytes: int = 0
    host_bytes: int = 0

    @property
    def phases(self) -> dict[str, int]:
        """Peaks by phase."""
        return {
            "forward": self.forward_bytes,
            "loss": self.loss_bytes,
            "backward": self.backward_bytes,
            "step": self.step_bytes,
        }


def read_memory_runs(path: Path) -> list[MemoryRun]:
    """The runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    return read_rows(MemoryRun, path)


def write_memory_runs(path: Path, runs: Iterable[MemoryRun]) -> None:
    """Replace the file by these runs in one step."""
    write_rows(MemoryRun, path, runs)
