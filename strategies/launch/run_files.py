"""Follows what ranks write into a run directory: their output, and the metrics of the first of them. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from strategies.launch.events import OutputLine
from strategies.launch.tail import LineFollower
from strategies.metrics import parse_row

_OUTPUT = re.compile(r"rank(\d+)\.(stdout|stderr)\.log")
_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")


class RunFiles:
    """What is new in the files of a run directory. Which ranks run here shows by the files they write.

    What the files hold when this begins is an earlier command's, and is not told again. Files are opened only when they
    have grown: this is called ten times a second beside ranks that need the processors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[str, LineFollower] = {}
        self._seen: dict[str, int] = {}
        self._leader: int | None = None
        self._refusals: set[str] = set()
        self._metrics_start: dict[str, int] = {}
        for name, size in self._sizes().items():
            if _OUTPUT.fullmatch(name):
                self._followers[name] = LineFollower(directory / name, offset=size)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Metrics from here on belong to a new attempt, whose first rank may be another."""
        self._leader = None
        self._refusals.clear()
        self._metrics_start = {name: size for name, size in self._sizes().items() if _METRICS.fullmatch(name)}

    def news(self, *, final: bool = False) -> Iterator[OutputLine | dict[str, Any]]:
        """New rows of metrics, of the lowest rank that wrote any in this attempt; then new lines: stderr of every rank,
        stdout of rank 0. What all ranks refuse alike is given once."""
        sizes = self._sizes()
        yield from self._rows(sizes, final=final)
        for name in sorted(sizes):
            match = _OUTPUT.fullmatch(name)
            if match and (match[2] == "stderr" or match[1] == "0"):
                stream: Literal["stdout", "stderr"] = "stdout" if match[2] == "stdout" else "stderr"
                for line in self._lines(name, sizes[name], final=final):
                    if line.startswith("error: "):
                        if line in self._refusals:
                            continue
                        self._refusals.add(line)
                    yield OutputLine(rank=int(match[1]), stream=stream, text=line)

    def _rows(self, sizes: Mapping[str, int], *, final: bool) -> Iterator[dict[str, Any]]:
        grown = [
            int(match[1])
            for name, size in sizes.items()
            if (match := _METRICS.fullmatch(name)) and size > self._metrics_start.get(name, 0)
        ]
        if not grown:
            return
        name = f"metrics-rank{min(grown)}.jsonl"
        if self._leader != min(grown):
            self._leader = min(grown)
            self._followers[name] = LineFollower(self._directory / name, offset=self._metrics_start.get(name, 0))
            self._seen.pop(name, None)
        for line in self._lines(name, sizes[name], final=final):
            row = parse_row(line)
            if row is not None:
                yield row

    def _lines(self, name: str, size: int, *, final: bool) -> list[str]:
        if self._seen.get(name) == size and not final:
            return []
        self._seen[name] = size
        return self._followers.setdefault(name, LineFollower(self._directory / name)).read_lines(final=final)

    def _sizes(self) -> dict[str, int]:
        """The files of the directory that are followed."""
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if _OUTPUT.fullmatch(entry.name) or _METRICS.fullmatch(entry.name)
            }
