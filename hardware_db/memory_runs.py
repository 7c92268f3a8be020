"""MemoryRun: what one configuration of one model needed on a real device, as a row of `measurements/memory_*.csv`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text

SHIPPED = Path(__file__).resolve().parent / "measurements"
"""Where the rows lie that come with dsplan."""

_MEASURED = (
    *("resident_bytes", "forward_bytes", "loss_bytes", "backward_bytes", "step_bytes"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "context_bytes", "host_bytes"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRun:
    """One run: the configuration by the names of a plan, where it ran, and the bytes of its busiest rank.

    `config` is JSON: a transformers config of which only the sizes are written. `ranks_per_device` processes shared one
    device; each was allowed `memory_limit_bytes`, 0 for no limit. A phase's bytes are the allocator's peak in it (on a
    CPU the tensors alive, those that were offloaded too), `device_used_bytes` is a process's share of what the driver
    showed beyond what was used before, `context_bytes` the same before the first tensor; 0 where nothing was measured.
    `outcome` is completed, out_of_memory or failed.
    """

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
    def key(self) -> tuple[object, ...]:
        """What was asked, without what came of it: two rows of one key are the same run."""
        return tuple(value for name, value in asdict(self).items() if name not in (*_MEASURED, "outcome"))

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def phases(self) -> dict[str, int]:
        """Peaks by phase."""
        return {
            "forward": self.forward_bytes,
            "loss": self.loss_bytes,
            "backward": self.backward_bytes,
            "step": self.step_bytes,
        }

    @property
    def model_config(self) -> dict[str, Any]:
        """The transformers config."""
        config: dict[str, Any] = json.loads(self.config)
        return config


def read_memory_runs(path: Path) -> list[MemoryRun]:
    """The runs of a file, in its order; none where there is no file.

    Raises:
        BrokenFile: a column is missing or a number is none.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [_run(row, f"{path}: row {number}") for number, row in enumerate(rows, start=1)]


def write_memory_runs(path: Path, runs: Iterable[MemoryRun]) -> None:
    """Replace the file by these runs in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[item.name for item in fields(MemoryRun)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(run) for run in runs)
    replace_text(path, text.getvalue())


def _run(row: Mapping[str, str | None], where: str) -> MemoryRun:
    try:
        return MemoryRun(**{item.name: _value(str(item.type), row[item.name]) for item in fields(MemoryRun)})
    except (KeyError, TypeError, ValueError) as problem:
        raise BrokenFile(where, f"is not a memory run ({problem})", "measure it again") from None


def _value(kind: str, text: str | None) -> Any:
    if kind == "bool":
        return {"True": True, "False": False}[text or ""]
    return int(text or "") if kind == "int" else text
