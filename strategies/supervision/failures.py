"""Reasons why a rank ends, recognised in the rank and left as `rank{N}.failure.json`. No torch."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.files import read_shipped_yaml
from hardware_db.notices import notice
from planner.errors import NothingFits
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import failure_path, success_path, write_json
from strategies.run_directory.heartbeat import PULSE, is_own
from strategies.run_directory.spec import EndingKind, exit_status_of

_MOST_CHARACTERS = 500
_DISK_FULL = tuple(os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT))
_ONE_AT_A_TIME = threading.Lock()


class NotFinite(DsplanError):
    """Losses or gradients stay NaN or infinite, so that continuing would train nothing."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rank's last word."""

    kind: EndingKind
    type: str
    message: str
    expected: bool
    """Whether it is reported in one line without a traceback."""
    step: int | None
    """The last one that ended; None before the first."""
    host: str
    attempt: int
    saved: str | None = None
    """The checkpoint that a stop on purpose has left."""
    behind: tuple[int, ...] = ()
    """The ranks for which a hung one waits."""
    silent: Mapping[int, int] = field(default_factory=dict)
    """Those of them that said nothing any more, with the number of the last heartbeat of each."""


def kind_of(error: BaseException) -> EndingKind:
    """Return what an exception means for the run; one that was raised from another means what that one does."""
    if isinstance(error, NotFinite):
        return "not_finite"
    for cause in _chain(error):
        if _is_out_of_memory(cause):
            return "out_of_memory"
    for cause in _chain(error):
        text = str(cause)
        is_told = any(word in text.lower() for word in _DISK_FULL)
        if is_told or (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
            return "disk_full"
        if isinstance(cause, ConnectionError) or (isinstance(cause, RuntimeError) and says(text, "lost")):
            return "lost"
    if isinstance(error, NothingFits):
        return "refused"
    # Peers of a rank that failed in a joint doing carry its exit status, which is not that of a refusal.
    return "refused" if isinstance(error, DsplanError) and error.exit_code == DsplanError.exit_code else "failed"


def failure_of(error: BaseException, directory: Path) -> Failure:
    """Describe an exception as a rank's last word."""
    if not isinstance(error, DsplanError) and (sentence := _why_it_needs_a_gpu(error)):
        return replace(describe_failure("refused", error, directory), message=sentence, expected=True)
    return describe_failure(kind_of(error), error, directory)


def _why_it_needs_a_gpu(error: BaseException) -> str | None:
    """Return what to change in a script that has CUDA or NCCL written into it, where there is no GPU; else None."""
    text = str(error).lower()
    wants = next((library for library in ("NCCL", "CUDA") if says(text, library)), None)
    torch = sys.modules.get("torch")
    if wants is None or torch is None or torch.cuda.is_available():
        return None
    where = own_line(traceback.extract_tb(error.__traceback__)) or "the script"
    remedy = {
        "CUDA": "write torch.device('cuda', local_rank) if torch.cuda.is_available() else torch.device('cpu') there",
        "NCCL": "write init_process_group() without a backend, or with 'gloo', there",
    }[wants]
    return f"{where}: asks for {wants}, and torch can use no GPU here; {remedy}, or run where there is one"


def own_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line that is nobody's library: `train.py, line 12`; empty where there is none."""
    lines = [f"{Path(frame.filename).name}, line {frame.lineno}" for frame in frames if is_own(frame.filename)]
    return lines[-1] if lines else ""


def describe_failure(kind: EndingKind, error: BaseException, directory: Path) -> Failure:
    """Describe an ending of a known kind as a rank's last word."""
    lines = str(error).strip().splitlines() or [""]
    return Failure(
        kind=kind,
        type=type(error).__name__,
        message=lines[0][:_MOST_CHARACTERS],
        expected=isinstance(error, DsplanError),
        step=PULSE.step or None,
        host=socket.gethostname(),
        attempt=attempt_of(directory),
    )


def attempt_of(directory: Path) -> int:
    """Return which attempt of its run this is, 0 where nobody counts."""
    try:
        options = AttemptOptions.load(directory)
    except (OSError, ValueError, TypeError, KeyError) as problem:
        notice(f"{directory}: the options of this attempt cannot be read ({problem})")
        return 0
    return 0 if options is None else options.attempt


def write_failure(directory: Path, rank: int, failure: Failure) -> None:
    """Leave a rank's last word, once: what ends a rank first is why it ended. A full disk cannot be helped."""
    path = failure_path(directory, rank)
    with _ONE_AT_A_TIME:
        if path.exists():
            return
        try:
            write_json(path, asdict(failure))
        except OSError as problem:
            notice(f"why rank {rank} ended could not be written: {problem}")


def write_success(directory: Path, rank: int) -> None:
    """Leave word that a rank ends with status 0, after which step and when: too early, where the others fail for it."""
    word = {"step": PULSE.step or None, "host": socket.gethostname(), "time": time.time()}
    try:
        write_json(success_path(directory, rank), word)
    except OSError as problem:
        notice(f"that rank {rank} completed could not be written: {problem}")


def read_failure(directory: Path, rank: int) -> dict[str, Any] | None:
    """Return a rank's failure record, or None if it left none that can be read."""
    try:
        failure = json.loads(failure_path(directory, rank).read_text())
    except (OSError, ValueError):
        return None
    return failure if isinstance(failure, dict) else None


def exit_status(failure: Failure) -> int:
    """Return the status with which a rank ends."""
    return exit_status_of(failure.kind, failure.type)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while handling which it was raised."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and says(str(error), "out_of_memory")


@cache
def read_messages() -> Mapping[str, Sequence[str]]:
    """Return the words of `messages.yaml`. A rank reads them when it begins: when it fails, memory may be out."""
    messages: Mapping[str, Sequence[str]] = read_shipped_yaml(Path(__file__).with_name("messages.yaml"))
    return messages


def says(text: str, what: str) -> bool:
    """Return whether a message has words of a kind of `messages.yaml`, in whatever case."""
    text = text.lower()
    return any(words in text for words in read_messages()[what])
