"""RunRow: a measured run as a row of `measurements/*.csv`; the columns that every kind of run has, read and written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text

SHIPPED = Path(__file__).resolve().parent / "measurements"
"""Where the rows lie that come with dsplan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run: the configuration by the names of a plan, and where it ran.

    `config` is JSON: a transformers config of which only the sizes are written. `ranks_per_device` processes shared one
    device; each was allowed `memory_limit_bytes`, 0 for no limit. `outcome` is completed, out_of_memory or failed.
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

    @property
    def key(self) -> tuple[object, ...]:
        """What was asked, without what came of it: two rows of one key are the same run."""
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
    """The runs of a file, in its order; none where there is no file.

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
