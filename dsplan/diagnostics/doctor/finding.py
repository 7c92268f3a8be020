"""The finding of one check: a line with a remedy. No torch."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line."""

    level: Level = "ok"
    """A `problem` keeps runs from working, a `warning` from working well or everywhere."""
    check: str
    """The word for what was looked at."""
    message: str
    remedy: str = ""
    """Empty for what is fine."""
    hosts: tuple[str, ...] = ()
    """The nodes on which it holds."""

    @classmethod
    def warning(cls, check: str, message: str, remedy: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Report what keeps runs from working well, or everywhere."""
        return cls(level="warning", check=check, message=message, remedy=remedy, hosts=hosts)

    @classmethod
    def problem(cls, check: str, message: str, remedy: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Report what keeps runs from working."""
        return cls(level="problem", check=check, message=message, remedy=remedy, hosts=hosts)

    @property
    def line(self) -> str:
        """The message with its remedy."""
        return self.message + (f"; {self.remedy}" if self.remedy else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON has it."""
        return {**asdict(self), "hosts": list(self.hosts)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Finding:
        """Read what `to_dict` wrote."""
        return cls(**{**raw, "hosts": tuple(raw["hosts"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """The speed at which two ranks sum a few numbers and a few megabytes; without figures if they could not talk."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    backend: str
    latency_seconds: float | None = None
    """Of an all-reduce of 4 bytes."""
    bandwidth_bytes_per_s: float | None = None
    """The bytes of a large all-reduce over its time."""

    @property
    def kind(self) -> str:
        """The links that it is compared with, in words."""
        return "within a node" if self.hosts[0] == self.hosts[1] else "between nodes"

    @property
    def name(self) -> str:
        """The two ranks and their hosts, in words."""
        first, second = self.ranks
        return f"ranks {first} and {second} ({' and '.join(dict.fromkeys(self.hosts))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that was found, worst first; `hosts` are the nodes that took part."""

    hosts: tuple[str, ...]
    ranks: int
    findings: tuple[Finding, ...]
    links: tuple[LinkTime, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 where there is a problem, else 0."""
        return 1 if any(finding.level == "problem" for finding in self.findings) else 0


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort problems first, then warnings; otherwise in the order of the checks."""
    return tuple(sorted(findings, key=lambda finding: LEVELS[::-1].index(finding.level)))


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings that several nodes share word by word once, with all of these nodes."""
    hosts_of: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts_of.setdefault(replace(finding, hosts=()), []).extend(finding.hosts)
    return [replace(finding, hosts=tuple(dict.fromkeys(hosts))) for finding, hosts in hosts_of.items()]


# Directories that all nodes share: rank 0 writes a file, the others look for it.
_PREFIX = ".dsplan-doctor-"
_SEEN_SECONDS = 3.0  # NFS keeps what it knows of a directory for that long by default (acdirmin is 30 s for listings)
_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def write_tokens(directories: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Keep a file of a new name in each directory while the context lasts; empty where none could be written."""
    written: dict[str, str] = {}
    try:
        for directory in directories:
            path = directory / f"{_PREFIX}{uuid.uuid4().hex}"
            written[str(directory)] = ""
            with contextlib.suppress(OSError):
                path.touch()
                written[str(directory)] = path.name
        yield written
    finally:
        for directory_name, name in written.items():
            if name:
                Path(directory_name, name).unlink(missing_ok=True)


def find_unseen(written: dict[str, str]) -> list[str]:
    """Return the directories in which this node does not see rank 0's file within a few seconds."""
    waiting = [directory for directory, name in written.items() if name]
    until = time.monotonic() + _SEEN_SECONDS
    while waiting and time.monotonic() < until:
        waiting = [directory for directory in waiting if not Path(directory, written[directory]).exists()]
        if waiting:
            time.sleep(_LOOK_SECONDS)
    return waiting
