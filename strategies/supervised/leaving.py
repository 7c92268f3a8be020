"""The last thing a rank does that stops on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from strategies.launch.endings import STOPPED, EndingKind
from strategies.supervised.failures import Failure, described, write_failure
from strategies.supervised.stopping import Stopped, Stopping
from strategies.supervised.watchdog import Watchdog


def stopped(kind: EndingKind, message: str, run_directory: Path, saved: Path | None) -> Failure:
    """The last word of a rank that stops on purpose, with the checkpoint it has left."""
    word = described(kind, Stopped(), run_directory)
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
