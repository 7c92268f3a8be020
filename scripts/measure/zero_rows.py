"""Runs of the benchmark of our own ZeRO, and the rows it leaves in `hardware_db/measurements/zero_cpu.csv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hardware_db.files import replacement
from scripts.measure.time_grid import MODELS

SIZES: Mapping[str, Mapping[str, Any]] = {
    "gpt2-14m": MODELS["gpt2-14m"],
    "gpt2-101m": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 20480, "n_positions": 512},
}
LENGTH = {"gpt2-14m": 128, "gpt2-101m": 64}
"""Words of a sample; a micro-batch is one sample."""
STAGES = ("zero1", "zero2", "zero3")
Engine = tuple[str, str]
ENGINES: tuple[Engine, ...] = (
    *(("zero1", "deepspeed"), ("zero1", "native"), ("zero2", "deepspeed"), ("zero2", "native")),
    *(("zero3", "deepspeed"), ("zero3", "native"), ("fsdp", "torch")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The training that every engine is asked for, and on how many ranks."""

    model: str
    precision: str
    accumulation: int
    ranks: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine in one setting: seconds are medians over `steps` steps in `turns` turns, bytes the busiest rank's.

    `resident_bytes` are alive between steps, `states_bytes` after the last backward pass, `peak_bytes` at most.
    The ranks shared `cores` of `cpu`.
    """

    model: str
    precision: str
    accumulation: int
    ranks: int
    strategy: str
    backend: str
    turns: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    fastest_seconds: float = 0.0
    slowest_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    resident_bytes: int = 0
    states_bytes: int = 0
    peak_bytes: int = 0
    peak_phase: str = ""
    cpu: str = ""
    cores: int = 0

    @property
    def setting(self) -> Setting:
        """Return what was measured."""
        return Setting(model=self.model, precision=self.precision, accumulation=self.accumulation, ranks=self.ranks)

    @property
    def key(self) -> tuple[Setting, Engine]:
        """The setting and the engine."""
        return self.setting, (self.strategy, self.backend)

    @property
    def line(self) -> str:
        """For people to read while it runs."""
        name = f"{self.model:9} {self.precision} x{self.accumulation} on {self.ranks}: {self.strategy} {self.backend}"
        if self.peak_bytes and not self.steps:
            sizes = (self.resident_bytes, self.states_bytes, self.peak_bytes)
            return f"{name:44} {' '.join(f'{size / 1e6:8.1f}' for size in sizes)} MB ({self.peak_phase})"
        parts = f"{self.forward_seconds:.3f} + {self.backward_seconds:.3f} + {self.optimizer_seconds:.3f}"
        spread = f"{self.fastest_seconds:.3f} to {self.slowest_seconds:.3f} in {self.steps}"
        return f"{name:44} {self.step_seconds:7.3f} s = {parts}  ({spread})"


Rows = Mapping[tuple[Setting, Engine], Row]


def read(path: Path) -> dict[tuple[Setting, Engine], Row]:
    """Return the rows of a file by setting and engine."""
    if not path.is_file():
        return {}
    kinds = {item.name: {"int": int, "float": float, "str": str}[str(item.type)] for item in fields(Row)}
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    rows = [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in lines]
    return {row.key: row for row in rows}


def write(path: Path, measured: Sequence[Row]) -> None:
    """Add rows to a file; what a row does not measure is kept from the one it replaces."""
    rows = read(path)
    for row in measured:
        before = rows.get(row.key)
        kept = {name: value for name, value in asdict(before).items() if not getattr(row, name)} if before else {}
        rows[row.key] = replace(row, **kept)
    with replacement(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in rows.values())
