"""Causes of an attempt's end, read from what its ranks and its launcher left in the run directory. No torch."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strategies.run_directory.files import AGENT_LOG, RESULT_FILE, heartbeat_path, log_path, stacks_files, stacks_path
from strategies.run_directory.spec import ENDING_KINDS, STOPS, EndingKind
from strategies.supervision.failures import says
from strategies.supervision.verdicts import Verdict, ranks_by_number, read_heartbeat_file, weigh

_FAILURE = re.compile(r"rank(\d+)\.failure\.json")
_SUCCESS = re.compile(r"rank(\d+)\.success\.json")
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
"""The line of its own source that gloo begins a message with; what follows its first sentence is advice."""
_CONNECTION_ERRORS = ("ConnectionError", *(kind.__name__ for kind in ConnectionError.__subclasses__()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The reason why an attempt did not complete.

    `rank` is the one that was first, or None if the launcher itself ended; `step` the global step it was in;
    `exit_status` its own, negative for a signal; `type` the exception's; `saved` the checkpoint of a stop on purpose.
    """

    kind: EndingKind
    rank: int | None = None
    host: str = ""
    step: int | None = None
    type: str = ""
    reason: str = ""
    log: Path | None = None
    exit_status: int | None = None
    saved: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the ending as JSON has it."""
        return {**asdict(self), "log": None if self.log is None else str(self.log)}


def ending_of(directory: Path, status: int, *, memory_killed: bool = False) -> Ending:
    """Return why an attempt ended whose launcher ended with `status`, not 0.

    `memory_killed` says that the kernel killed a process of this cgroup for want of memory meanwhile.
    """
    result = _read(directory / RESULT_FILE)
    codes = {int(rank): int(code) for rank, code in result.get("failures", {}).items()}
    failures = _words_of(directory, _FAILURE)
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    silent = {
        rank: code for rank, code in (own or ({} if failures else codes)).items() if code and rank not in failures
    }
    believed = _believed_failures(directory, failures)
    endings = [_ending_of(directory, rank, failure, codes.get(rank)) for rank, failure in believed.items()]
    endings += [_silent(directory, rank, code, memory_killed=memory_killed) for rank, code in silent.items()]
    if (deserter := _who_ended_early(directory, endings)) is not None:
        endings = [deserter]
    endings.sort(key=_priority)
    if result.get("kind") in ENDING_KINDS:
        return _as_launcher_says(result, endings, directory)
    return endings[0] if endings else _of_launcher(directory, status, memory_killed=memory_killed)


def forget_last_attempt(directory: Path) -> None:
    """Remove what the last attempt left to say why it ended, before the next one begins."""
    for pattern in ("rank*.failure.json", "rank*.success.json", "rank*.pid", "rank*.heartbeat", RESULT_FILE):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def remove_empty_stacks(directory: Path, attempt: int) -> None:
    """Remove the files of ranks that wrote no stacks; those of ranks that hung stay."""
    for path in stacks_files(directory, attempt):
        if not path.stat().st_size:
            path.unlink()


def with_stacks_as_log(ending: Ending, directory: Path, attempt: int) -> Ending:
    """Return a hang with the stacks of the rank that is behind as its log, where it wrote any."""
    if ending.rank is None:
        return ending
    stacks = stacks_path(directory, ending.rank, attempt)
    return replace(ending, log=stacks) if stacks.exists() else ending


def _words_of(directory: Path, kind: re.Pattern[str]) -> dict[int, dict[str, Any]]:
    """Return what ranks wrote of their own ends; a file cut short says nothing."""
    named = ((kind.fullmatch(path.name), path) for path in directory.glob("rank*.json"))
    return {int(match[1]): word for match, path in named if match and (word := _read(path))}


def _who_ended_early(directory: Path, endings: Sequence[Ending]) -> Ending | None:
    """Return the rank that ended with status 0 while others trained, where they ended for nothing else."""
    ended = _words_of(directory, _SUCCESS)
    if not ended or not endings or not all(_may_miss(ending, ended) for ending in endings):
        return None
    rank = min(ended, key=lambda rank: float(ended[rank].get("time") or 0))
    step = ended[rank].get("step")
    where = "before its first step" if step is None else f"at step {step}"
    return Ending(
        kind="failed",
        rank=rank,
        host=str(ended[rank].get("host") or ""),
        step=step,
        type="EndedEarly",
        reason=f"ended with status 0 {where} while the others were training",
        log=log_path(directory, rank, "stderr"),
        exit_status=0,
    )


def _may_miss(ending: Ending, ended: Mapping[int, object]) -> bool:
    """Return whether a rank may have ended only because another did: its collectives failed, or waited for it."""
    if ending.kind == "hung":
        return ending.rank in ended
    return _is_echo(ending) or ending.exit_status == -signal.SIGABRT


def _ending_of(directory: Path, rank: int, failure: Mapping[str, Any], exit_status: int | None) -> Ending:
    """Return the ending that a rank wrote down itself."""
    message = str(failure.get("message", ""))
    if says(message, "lost") or says(message, "echo"):
        message = _SOURCE_LINE.sub("", message).split(". ")[0]
    # The rank that noticed a hang waits for the one that is behind.
    behind = [int(rank) for rank in failure.get("behind") or ()]
    return Ending(
        kind=_kind(failure),
        rank=behind[0] if behind else rank,
        host="" if behind else str(failure.get("host") or ""),
        step=failure.get("step"),
        type=str(failure.get("type", "")),
        reason=message if failure.get("expected") else f"{failure.get('type')}: {message}",
        log=log_path(directory, rank, "stderr"),
        exit_status=exit_status,
        saved=failure.get("saved"),
    )


def _believed_failures(directory: Path, failures: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Leave out what ranks reported of a hang where those they accuse have spoken since."""
    verdicts = {
        rank: Verdict(
            behind=tuple(failure["behind"]),
            sentence=str(failure.get("message", "")),
            silent=ranks_by_number(failure.get("silent") or {}),
        )
        for rank, failure in failures.items()
        if failure.get("behind")
    }
    accused = {rank for verdict in verdicts.values() for rank in verdict.silent}
    believed = weigh(verdicts, {rank: read_heartbeat_file(heartbeat_path(directory, rank)) for rank in accused})
    return {
        rank: {**failure, "behind": believed[rank].behind} if rank in believed else failure
        for rank, failure in failures.items()
        if rank in believed or rank not in verdicts
    }


def _kind(failure: Mapping[str, Any]) -> EndingKind:
    """Return the kind that a rank named; by its words where it named none, or only lost a peer in its collective."""
    kind, words = failure.get("kind"), str(failure.get("message", ""))
    if kind in ENDING_KINDS and kind != "failed":
        return kind  # type: ignore[no-any-return]
    if kind is None and failure.get("expected"):
        return "refused"
    if kind is None and says(words, "out_of_memory_printed"):
        return "out_of_memory"
    return "lost" if says(words, "echo") else "failed"


def _priority(ending: Ending) -> tuple[int, bool, bool, int]:
    return ENDING_KINDS.index(ending.kind), _is_echo(ending), ending.rank is None, ending.rank or 0


def _is_echo(ending: Ending) -> bool:
    """Return whether a rank may only have lost a peer, as gloo, NCCL and the store tell it, and nothing of its own."""
    return ending.kind == "lost" and ending.type not in _CONNECTION_ERRORS


def _silent(directory: Path, rank: int, code: int, *, memory_killed: bool) -> Ending:
    """Return the ending of a rank that said nothing."""
    log = log_path(directory, rank, "stderr")
    kind: EndingKind = "killed" if code < 0 else "failed"
    reason = f"killed by signal {-code}" if code < 0 else _last_line(log) or f"exit status {code}"
    if code == -signal.SIGKILL and memory_killed:
        kind, reason = "out_of_memory", "killed by the kernel: the host, or the job's share of it, is out of memory"
    elif code == -signal.SIGABRT and says(_last_line(log), "mismatch"):
        kind = "refused"
        reason = (
            "it met another rank in another collective; the model, its state_dict() and its evaluation have to be "
            "called on all ranks, which all have a part of it"
        )
    elif says(reason, "out_of_memory_printed"):
        kind = "out_of_memory"
    return Ending(kind=kind, rank=rank, reason=reason, log=log, exit_status=code)


def _as_launcher_says(result: Mapping[str, Any], endings: Sequence[Ending], directory: Path) -> Ending:
    """Return the kind that the launcher names, which knows other nodes; the rest is of a rank that says so."""
    kind: EndingKind = result["kind"]
    for ending in endings:
        if ending.kind == kind or (ending.kind in STOPS and kind in STOPS):
            return replace(ending, kind=kind)
    reason, host = str(result.get("reason") or kind), str(result.get("node") or "")
    return Ending(kind=kind, reason=reason, host=host, log=directory / AGENT_LOG)


def _of_launcher(directory: Path, status: int, *, memory_killed: bool) -> Ending:
    log = directory / AGENT_LOG
    # A signal's number is added to 128 by whatever stands between the program and this process.
    number = -status if status < 0 else status - 128
    if 0 < number < signal.NSIG:
        kind: EndingKind = "out_of_memory" if number == signal.SIGKILL and memory_killed else "killed"
        return Ending(kind=kind, reason=f"the launcher was killed by signal {number}", log=log, exit_status=-number)
    return Ending(kind="failed", reason=_last_line(log) or f"status {status}", log=log, exit_status=status)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return document if isinstance(document, dict) else {}


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
