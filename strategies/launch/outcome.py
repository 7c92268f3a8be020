"""How a run ended, and the one line that says why."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strategies.launch.local import AGENT_LOG
from strategies.launch.spec import RESULT_FILE, failure_path, log_path

OutcomeName = Literal["completed", "failed", "out_of_memory", "interrupted"]

_OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a run. `reason` is the failing rank's last word, `log` where the rest of it is."""

    name: OutcomeName
    exit_code: int
    rank: int | None = None
    reason: str = ""
    log: Path | None = None


def judge(directory: Path, ranks: int, agent_status: int) -> Outcome:
    """The outcome of a run whose agent ended with `agent_status` by itself."""
    if agent_status == 0:
        return Outcome(name="completed", exit_code=0)
    exit_codes = _failed_ranks(directory)
    failures = {rank: failure for rank in range(ranks) if (failure := _read_failure(directory, rank))}
    rank = _culprit(exit_codes, failures)
    if rank is None:
        log = directory / AGENT_LOG
        return Outcome(name="failed", exit_code=1, reason=_last_line(log) or f"status {agent_status}", log=log)
    log = log_path(directory, rank, "stderr")
    exit_code = exit_codes.get(rank, 1)
    failure = failures.get(rank)
    reason = _reason(failure, exit_code) or _last_line(log) or f"exit status {exit_code}"
    # A kill is no proof: people and batch systems send signal 9 too.
    out_of_memory = exit_code >= 0 and any(word in reason.lower() for word in _OUT_OF_MEMORY_WORDS)
    status = 2 if failure and failure.get("expected") and exit_code == 2 else 1
    return Outcome(
        name="out_of_memory" if out_of_memory else "failed", exit_code=status, rank=rank, reason=reason, log=log
    )


def _failed_ranks(directory: Path) -> dict[int, int]:
    path = directory / RESULT_FILE
    if not path.exists():
        return {}
    return {int(rank): code for rank, code in json.loads(path.read_text())["failures"].items()}


def _read_failure(directory: Path, rank: int) -> dict[str, Any] | None:
    path = failure_path(directory, rank)
    return json.loads(path.read_text()) if path.exists() else None


def _culprit(exit_codes: Mapping[int, int], failures: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The rank that failed first: one that ended by itself, before those that elastic then ended by SIGTERM."""
    own = [rank for rank, code in sorted(exit_codes.items()) if code != -signal.SIGTERM]
    candidates = own or sorted(failures) or sorted(exit_codes)
    said_why = [rank for rank in candidates if rank in failures]
    return next(iter(said_why or candidates), None)


def _reason(failure: Mapping[str, Any] | None, exit_code: int) -> str:
    if failure is not None:
        message = str(failure["message"])
        return message if failure.get("expected") else f"{failure['type']}: {message}"
    if exit_code == -signal.SIGKILL:
        return "killed by signal 9, which is what Linux does to a process when the host runs out of memory"
    return f"killed by signal {-exit_code}" if exit_code < 0 else ""


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
