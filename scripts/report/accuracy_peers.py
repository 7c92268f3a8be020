"""Answers of other tools for the cases: `hardware_db/measurements/memory_peers.csv`, filled by `peers.py`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

from hardware_db.measured_rows import SHIPPED

PATH = SHIPPED / "memory_peers.csv"
PEERS = {
    "accelerate": "`accelerate estimate-memory`",
    "deepspeed": "DeepSpeed's `estimate_zero*_model_states_mem_needs`",
    "llm-analysis": "llm-analysis",
    "torch": "torch's MemTracker and FSDPMemTracker",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAnswer:
    """Bytes per GPU that a tool says, 0 with the reason where it says none."""

    case: str
    peer: str
    version: str
    bytes: int
    reason: str


def read_peers() -> list[PeerAnswer]:
    """Every answer, in file order; none where no tool was asked yet."""
    if not PATH.exists():
        return []
    with PATH.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [PeerAnswer(**{**row, "bytes": int(row["bytes"])}) for row in rows]
