"""LaunchSpec: everything the launched processes need to know, handed to them as one file."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strategies.launch.settings import Placement, ScriptKind, Supervision

SPEC_FILE = "launch.json"
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One launch on this node: the script with its arguments, its processes, and where they write.

    `accumulates` says whether an accelerate script honours gradient accumulation; `processes` counts the ranks of one
    node; `environment` is added to the processes' own. `run_id` tells this run's checkpoints from those of others.
    """

    script: str
    arguments: tuple[str, ...] = ()
    kind: ScriptKind
    accumulates: bool = False
    processes: int
    run_directory: str
    environment: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    supervision: Supervision = field(default_factory=Supervision)
    run_id: str = ""

    @property
    def directory(self) -> Path:
        return Path(self.run_directory)

    @property
    def path(self) -> Path:
        """Where `save` writes: what every rank gets as its argument."""
        return self.directory / SPEC_FILE

    def save(self) -> None:
        """Write the spec into its run directory."""
        write_json(self.path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> LaunchSpec:
        """The spec that `save` wrote."""
        raw = json.loads(path.read_text())
        placement = {**raw["placement"], "options": tuple(raw["placement"]["options"])}
        parts = {"placement": Placement(**placement), "supervision": Supervision(**raw["supervision"])}
        return cls(**{**raw, "arguments": tuple(raw["arguments"]), **parts})


def log_path(directory: Path, rank: int, stream: str) -> Path:
    """Where rank `rank`'s `stdout` or `stderr` goes."""
    return directory / f"rank{rank}.{stream}.log"


def failure_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says why it failed."""
    return directory / f"rank{rank}.failure.json"


def success_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says that it has ended with status 0, and at which step."""
    return directory / f"rank{rank}.success.json"


def pid_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` leaves its process id, once it takes signals."""
    return directory / f"rank{rank}.pid"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says every few seconds how far it is."""
    return directory / f"rank{rank}.heartbeat"


def stacks_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` writes the stacks of its threads when it hangs."""
    return directory / f"rank{rank}.stacks.txt"


def keep_result(directory: Path, result: object) -> None:
    """Write how the ranks ended. A disk that is full by then changes nothing about it, and they have said it too."""
    with suppress(OSError):
        write_json(directory / RESULT_FILE, result)


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1))
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
