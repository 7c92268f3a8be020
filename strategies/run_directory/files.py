"""Files of a run directory, by which its command and its ranks talk: their names, and JSON in them. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_whole
from hardware_db.from_json import WrongValue, from_json

Value = TypeVar("Value")

SPEC_FILE = "launch.json"
"""What was launched on this node: a `LaunchSpec`."""
ATTEMPT_OPTIONS_FILE = "orders.json"
"""The `AttemptOptions` of the newest attempt; the name has stayed, so that runs of earlier releases can be resumed."""
PLAN_FILE = "plan.yaml"
"""The plan in use, to run again with `--plan`."""
TUNING_FILE = "tuning.json"
"""What tuning has measured: a `Tuning`, on rank 0's node."""
CLAIM_FILE = "claim.json"
"""What trains in the ranks: a `Claim`."""
JOURNAL_FILE = "run.jsonl"
"""Attempts, endings, decisions and alerts (`Journal`)."""
LINEAGE_FILE = "checkpoints.jsonl"
"""The checkpoints of the run (`strategies/supervision/lineage.py`)."""
GIVEN_PLAN_FILE = "requested-plan.yaml"
"""The plan of `--plan`, where its own file is on another machine."""
HOLD_FILE = "store.json"
"""Under which number this directory's command holds the run in an object store (`strategies/launch/run_hold.py`)."""
CHECKPOINTS = "checkpoints"
"""Where ranks save by themselves unless `--checkpoint-dir` says otherwise."""
RESULT_FILE = "result.json"
"""How the ranks of an attempt ended, as their launcher saw it."""
REPORT_FILE = "report.md"
"""The last page that `dsplan run` printed."""
AGENT_LOG = "agent.log"
"""What the launcher itself printed."""
LOCK_FILE = "run.lock"
"""Held by the command that supervises the run."""
LAUNCHER_LOCK_FILE = "launcher.lock"
"""Held by the processes of a launcher."""


def log_path(directory: Path, rank: int, stream: str) -> Path:
    """Return where a rank's `stdout` or `stderr` goes."""
    return directory / f"rank{rank}.{stream}.log"


def metrics_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes its metrics."""
    return directory / f"metrics-rank{rank}.jsonl"


def metrics_files(directory: Path) -> dict[int, Path]:
    """Return the metrics files that are there, by rank."""
    numbered = ((path.stem.removeprefix("metrics-rank"), path) for path in directory.glob("metrics-rank*.jsonl"))
    return {int(number): path for number, path in numbered if number.isdecimal()}


def failure_path(directory: Path, rank: int) -> Path:
    """Return where a rank says why it failed."""
    return directory / f"rank{rank}.failure.json"


def success_path(directory: Path, rank: int) -> Path:
    """Return where a rank says that it has ended with status 0, and at which step."""
    return directory / f"rank{rank}.success.json"


def pid_path(directory: Path, rank: int) -> Path:
    """Return where a rank leaves its process id, once it takes signals."""
    return directory / f"rank{rank}.pid"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Return where a rank says every few seconds how far it is."""
    return directory / f"rank{rank}.heartbeat"


def stacks_path(directory: Path, rank: int, attempt: int) -> Path:
    """Return where a rank writes the stacks of its threads when it hangs in an attempt; later ones leave it."""
    return directory / f"attempt{attempt}.rank{rank}.stacks.txt"


def stacks_files(directory: Path, attempt: int) -> list[Path]:
    """Return the files of stacks that the ranks of an attempt have begun, empty ones among them."""
    return sorted(directory.glob(f"attempt{attempt}.rank*.stacks.txt"))


def profile_paths(directory: Path, rank: int) -> tuple[Path, Path]:
    """Return where a rank leaves the Chrome trace and the memory snapshot of steps that were profiled."""
    return directory / f"profile-rank{rank}.trace.json", directory / f"profile-rank{rank}.memory.pickle"


def profiles_in(directory: Path) -> dict[str, tuple[Path, ...]]:
    """Return the profiles in a run directory by what opens them."""
    by_viewer = {
        "ui.perfetto.dev or chrome://tracing": tuple(sorted(directory.glob("profile-rank*.trace.json"))),
        "pytorch.org/memory_viz": tuple(sorted(directory.glob("profile-rank*.memory.pickle"))),
    }
    return {viewer: paths for viewer, paths in by_viewer.items() if paths}


def keep_result(directory: Path, result: object) -> None:
    """Write how the ranks ended. A disk that is full by then changes nothing about it, and they have said it too."""
    with suppress(OSError):
        write_json(directory / RESULT_FILE, result)


def read_json(kind: type[Value], path: Path, upgrade: Callable[[Any], Any] | None = None) -> Value:
    """Read the dataclass that `write_json` wrote; `upgrade` makes of an earlier release's document one of this.

    Raises:
        BrokenFile: it is that of another version, or damaged.
    """
    try:
        document = json.loads(path.read_text())
        return from_json(kind, upgrade(document) if upgrade else document)
    except (ValueError, RecursionError, WrongValue) as error:
        problem = f"not a run of this version of dsplan ({' '.join(str(error).split())})"
        raise BrokenFile(path, problem, "start a new one") from None


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, whole or not at all."""
    replace_whole(path, json.dumps(value, indent=1))
