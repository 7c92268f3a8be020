"""One `dsplan run` at a time in a run directory. No torch."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from hardware_db.errors import DsplanError
from strategies.run_directory.files import LAUNCHER_LOCK_FILE, LOCK_FILE

# A command that was killed leaves ranks that end with its launcher: SIGTERM, 10 s, then SIGKILL (see local.py).
_PATIENCE_SECONDS = 45.0

# A page of many runs looks whether one is held: it has the lock for some microseconds.
_LOOK_SECONDS = 1.0


class RunLock:
    """Held while a command supervises a run; the kernel takes it from a process that ends, however it ends.

    Raises:
        DsplanError: another process holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._file: IO[bytes] | None = None

    def __enter__(self) -> RunLock:
        self._file = self._path.open("ab")
        if not _lock_within(self._file, _LOOK_SECONDS):
            self._file.close()
            raise DsplanError(
                f"{self._path.parent}: another dsplan run is at work here; stop it first, or name another --run-dir"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


def is_held(directory: Path) -> bool:
    """Return whether a command supervises the run of a directory now, as far as this machine can know."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def launcher_lock(directory: Path) -> IO[bytes]:
    """Return an open file whose lock says that a launcher's processes run, when those of earlier ones are gone.

    Hand its descriptor on to the launcher's process, then close it.

    Raises:
        DsplanError: they are still there.
    """
    path = directory / LAUNCHER_LOCK_FILE
    file = path.open("ab")
    os.set_inheritable(file.fileno(), False)
    if not _lock_within(file, _PATIENCE_SECONDS):
        file.close()
        raise DsplanError(f"{directory}: processes of an earlier start still run here; stop them first")
    return file


def _lock_within(file: IO[bytes], seconds: float) -> bool:
    """Return whether the lock could be had, tried again and again for so long."""
    deadline = time.monotonic() + seconds
    while not _try_lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
