"""One rank's metrics file, as `strategies/metrics.py` describes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from strategies.launch.orders import Orders
from strategies.metrics import metrics_path, parse_row


class MetricsFile:
    """Appends rows, from any thread. Where `dsplan run` gave orders they follow those of earlier attempts; elsewhere
    the file is new. A file that takes no more is told once, on stderr, and ends no training."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        orders = Orders.load(directory)
        self.path = metrics_path(directory, rank)
        self.attempt = 0 if orders is None else orders.attempt
        self._lock = Lock()
        self._is_told = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if orders is None else 0)
        self._file: int | None = os.open(self.path, flags, 0o644)
        self._is_cut = _is_cut(self.path)
        self._began = self.path.stat().st_size
        if orders is not None:
            self.write({"event": "attempt", "attempt": orders.attempt})

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: one write, so that nobody reads half of it and no other writer comes between."""
        line = json.dumps(row).encode() + b"\n"
        with self._lock:
            if self._file is None:
                return
            # What a killed attempt or a full disk left of a line gets an end.
            whole = b"\n" + line if self._is_cut else line
            try:
                self._is_cut = os.write(self._file, whole) < len(whole)
            except OSError as problem:
                self._tell(problem)

    def own_rows(self) -> list[dict[str, Any]]:
        """What this attempt wrote, read back: a long run keeps no rows in memory."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._began)
                return [row for line in file if (row := parse_row(line.decode(errors="replace"))) is not None]
        except OSError:
            return []

    def close(self) -> None:
        """Later rows are dropped."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _tell(self, problem: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            print(f"dsplan: {self.path} takes no more rows ({problem.strerror})", file=sys.stderr, flush=True)


def _is_cut(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
