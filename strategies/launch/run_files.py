"""Follows what ranks write into a run directory: their output, and the metrics of the first of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategies.launch.events import OutputLine
from strategies.launch.tail import LineFollower
from strategies.metrics import parse_row

_OUTPUT = re.compile(r"rank(\d+)\.(stdout|stderr)\.log")
_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")


class RunFiles:
    """What is new in the files of a run directory. Which ranks run here shows by the files they write.

    What the files hold when this begins is an earlier command's, and is not told again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[str, LineFollower] = {}
        self._leader: int | None = None
        self._metrics_start: dict[str, int] = {}
        for name, size in self._sizes().items():
            if _OUTPUT.fullmatch(name):
                self._followers[name] = LineFollower(directory / name, offset=size)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Metrics from here on belong to a new attempt, whose first rank may be another."""
        self._leader = None
        self._metrics_start = {name: size for name, size in self._sizes().items() if _METRICS.fullmatch(name)}

    def output(self, *, final: bool = False) -> Iterator[OutputLine]:
        """New lines: stderr of every rank, stdout of rank 0."""
        for name in sorted(self._sizes()):
            match = _OUTPUT.fullmatch(name)
            if match and (match[2] == "stderr" or match[1] == "0"):
                for line in self._follower(name).read_lines(final=final):
                    yield OutputLine(
                        rank=int(match[1]), stream="stdout" if match[2] == "stdout" else "stderr", text=line
                    )

    def rows(self, *, final: bool = False) -> Iterator[dict[str, Any]]:
        """New metrics of the lowest rank that wrote any in this attempt."""
        sizes = self._sizes()
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
        for line in self._follower(name).read_lines(final=final):
            row = parse_row(line)
            if row is not None:
                yield row

    def _follower(self, name: str) -> LineFollower:
        return self._followers.setdefault(name, LineFollower(self._directory / name))

    def _sizes(self) -> dict[str, int]:
        """The files of the directory that are followed."""
        sizes = {}
        for path in self._directory.iterdir():
            if _OUTPUT.fullmatch(path.name) or _METRICS.fullmatch(path.name):
                sizes[path.name] = path.stat().st_size
        return sizes
