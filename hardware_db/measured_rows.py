"""RunRow: a measured run as a row of `measurements/*.csv`; the columns that every kind of run has, read and written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text
from hardware_db.records import dataclass

SHIPPED = Path(__file__).resolve().parent / "measurements"
"""Where the rows lie that come with dsplan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run: the configuration by the names of a plan, and where it ran.

    `config` is JSON: a transformers config of which only the sizes are written. `ranks_per_device` processes shared one
    device; each was allowed `memory_limit_bytes`, 0 for no limit. `outcome` is completed, out_of_memory or failed.
    Ranks on a processor shared `cores` of `cpu`; empty and 0 on GPUs, in traces, and where nobody wrote it down.
    """

    KIND: ClassVar[str] = "run"
    MEASURED: ClassVar[tuple[str, ...]] = ()
    """Columns that hold what came of a run."""

    model: str
    config: str
    task: str
    strategy: str
    backend: str
    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    sequence_length: int
    precision: str
    optimizer: str
    attention: str
    activation_checkpointing: str
    offload: str
    sync_each_micro_batch: bool
    device: str
    ranks_per_device: int
    memory_limit_bytes: int
    driver: str
    torch: str
    transformers: str
    deepspeed: str
    outcome: str
    cpu: str = ""
    cores: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """The question, without its answer: two rows of one key are the same run."""
        return tuple(value for name, value in asdict(self).items() if name not in (*self.MEASURED, "outcome"))

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def model_config(self) -> dict[str, Any]:
        """The transformers config."""
        config: dict[str, Any] = json.loads(self.config)
        return config


Row = TypeVar("Row", bound=RunRow)


def read_rows(kind: type[Row], path: Path) -> list[Row]:
    """Return the runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [_run(kind, row, f"{path}: row {number}") for number, row in enumerate(rows, start=1)]


def write_rows(kind: type[Row], path: Path, runs: Iterable[Row]) -> None:
    """Replace the file by these runs in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[item.name for item in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(run) for run in runs)
    replace_text(path, text.getvalue())


def _run(kind: type[Row], row: Mapping[str, str | None], where: str) -> Row:
    try:
        return kind(**{item.name: _value(str(item.type), row[item.name]) for item in fields(kind)})
    except (KeyError, TypeError, ValueError) as problem:
        raise BrokenFile(where, f"is not a {kind.KIND} ({problem})", "measure it again") from None


def _value(kind: str, text: str | None) -> Any:
    if kind == "bool":
        return {"True": True, "False": False}[text or ""]
    return {"int": int, "float": float}.get(kind, str)(text or "")


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
        *("cpu", "cores"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedRun(MemoryRun):
    """A run on emulated cards; `peak_requested_bytes` is the most that its tensors asked the allocator for.

    `traced_…_bytes` are a trace's predictions of the three peaks, 0 where the run is not traced as a whole.
    """

    KIND: ClassVar[str] = "emulated run"
    MEASURED: ClassVar[tuple[str, ...]] = (
        *(*MemoryRun.MEASURED, "peak_requested_bytes"),
        *("traced_requested_bytes", "traced_allocated_bytes", "traced_reserved_bytes"),
    )

    peak_requested_bytes: int = 0
    traced_requested_bytes: int = 0
    traced_allocated_bytes: int = 0
    traced_reserved_bytes: int = 0


def read_memory_runs(path: Path) -> list[MemoryRun]:
    """Return the runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    return read_rows(MemoryRun, path)


def write_memory_runs(path: Path, runs: Iterable[MemoryRun]) -> None:
    """Replace the file by these runs in one step."""
    write_rows(MemoryRun, path, runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRun(RunRow):
    """A run with the seconds of one optimizer step, all ranks beginning it together.

    Each rank computed on `threads`. `step_seconds` is the median over `steps` steps of the slowest rank,
    `fastest_seconds` and `slowest_seconds` their 10th and 90th percentile; forward, backward and optimizer are medians
    of their own. `rounds` is how often the run was started anew.
    """

    KIND: ClassVar[str] = "timed run"
    MEASURED: ClassVar[tuple[str, ...]] = (
        *("rounds", "steps", "step_seconds", "fastest_seconds", "slowest_seconds"),
        *("forward_seconds", "backward_seconds", "optimizer_seconds"),
    )

    threads: int
    rounds: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    fastest_seconds: float = 0.0
    slowest_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def spread(self) -> float:
        """Spread of the steps of the run over their median."""
        return (self.slowest_seconds - self.fastest_seconds) / self.step_seconds


def read_time_runs(path: Path) -> list[TimeRun]:
    """Return the runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    return read_rows(TimeRun, path)


def write_time_runs(path: Path, runs: Iterable[TimeRun]) -> None:
    """Replace the file by these runs in one step."""
    write_rows(TimeRun, path, runs)
