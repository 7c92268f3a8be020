"""The start of a rank's process, before its script: signals, stacks on demand, and the thread that watches."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hardware_db.files import replace_whole
from hardware_db.notices import notice
from strategies.run_directory import claim
from strategies.run_directory.files import failure_path, pid_path, success_path
from strategies.run_directory.spec import SAVING, STOPPED, EndingKind, LaunchSpec
from strategies.supervision.failures import (
    Failure,
    describe_failure,
    read_messages,
    write_failure,
    write_success,
)
from strategies.supervision.hang_detection import Watchdog, begin_watching
from strategies.supervision.stopping import STOP_SIGNAL, Stopped, Stopping

_USABLE = 0.8
"""Share of the grace that a rank may use; ending takes the rest."""


def begin(spec: LaunchSpec, rank: int) -> None:
    """Take signals, watch for hangs, and write down this rank's process id.

    Scripts in which nothing of dsplan sees the end of a step cannot save when they are asked to, and before somebody
    has claimed the run there is nothing to save: these end at once. Who saves listens to SIGTERM too.
    """
    read_messages()
    directory = spec.directory
    failure_path(directory, rank).unlink(missing_ok=True)
    success_path(directory, rank).unlink(missing_ok=True)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, frame: _leave_unsaved(spec, rank))
    grace_seconds = _USABLE * spec.supervision.grace_seconds
    claim.once_claimed(lambda kind: STOP_SIGNAL.listen(grace_seconds=grace_seconds) if kind in SAVING else None)
    begin_watching(directory, rank, spec.supervision.hang_seconds)
    leave_word_at_exit(directory, rank)
    try:
        replace_whole(pid_path(directory, rank), str(os.getpid()))
    except OSError as problem:
        notice(f"the process id of rank {rank} could not be written: {problem}")


def leave_word_at_exit(directory: Path, rank: int) -> None:
    """Have `os._exit(0)`, which runs nothing of what Python does at its end, leave word of an end with status 0."""
    end, own = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        words = (success_path(directory, rank), failure_path(directory, rank))
        if status == 0 and os.getpid() == own and not any(path.exists() for path in words):
            write_success(directory, rank)
        end(status)

    os._exit = leave


def _leave_unsaved(spec: LaunchSpec, rank: int) -> None:
    failure = describe_failure("preempted", Stopped(), spec.directory)
    write_failure(spec.directory, rank, failure)
    raise Stopped


# The last thing a rank does that stops on purpose.


def describe_stop(kind: EndingKind, message: str, run_directory: Path, saved: Path | None) -> Failure:
    """Describe a stop on purpose as a rank's last word, with the checkpoint it has left."""
    word = describe_failure(kind, Stopped(), run_directory)
    return replace(word, message=message, expected=True, saved=None if saved is None else str(saved))


def leave(stopping: Stopping, watch: Watchdog, run_directory: Path, word: Failure) -> NoReturn:
    """Leave the last word, wait a moment for the other ranks, and end; every rank calls this.

    Raises:
        Stopped: always.
    """
    write_failure(run_directory, watch.rank, word)
    watch.expect_end(STOPPED)
    stopping.take_leave()
    raise Stopped
