"""One benchmark measures at a time: two at once would each measure the other."""

from __future__ import annotations

import os
from types import TracebackType
from typing import IO

from hardware_db.errors import BrokenFile
from hardware_db.paths import data_dir

LOCK_NAME = "bench.lock"


class Turn:
    """This process's turn among all benchmarks that store into the same database. Leaving the context ends it.

    The lock is the operating system's, which lets go of it however its holder ends. Where there is none (Windows),
    benchmarks do not wait for each other.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def __enter__(self) -> Turn:
        path = data_dir() / LOCK_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            remedy = "set DSPLAN_HOME to a directory you can write to"
            raise BrokenFile(path, f"cannot be written ({error.strerror})", remedy) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, *, wait: bool) -> bool:
        """Whether it is this process's turn now; with `wait`, after however long the others take."""
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(self._open.fileno(), fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def others_were_here(self) -> bool:
        """Whether the last turn was another process's; from now on it is this one's."""
        me = str(os.getpid())
        self._open.seek(0)
        last = self._open.read()
        self._open.truncate(0)
        self._open.write(me)
        self._open.flush()
        return last != me

    @property
    def _open(self) -> IO[str]:
        if self._file is None:
            raise RuntimeError("the turn was not entered")
        return self._file
