"""One checkpoint on its way to disk: a thread on every rank, which meet in the folder and not over the network.

Each rank writes its file and then a note of the file's checksum; rank 0 publishes when it finds every rank's note. So
writing goes on while the ranks train, whatever the main threads send to each other meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

from strategies.checkpoint import checksums, folder
from strategies.checkpoint.safefile import FileSum, sum_of
from strategies.environment import Environment
from strategies.errors import BrokenFile

_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 600.0

Write = Callable[[Path], Mapping[str, FileSum]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a checkpoint goes: `directory/name` when it is complete; how many of the newest stay (None: all)."""

    directory: Path
    name: str
    keep_last: int | None

    @property
    def path(self) -> Path:
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        return folder.temporary(self.directory, self.name)


class Writing:
    """Runs `write` with the temporary folder on this rank, and on rank 0 the publication after all ranks' parts.

    `write` returns the sums of the files it has written as far as it knows them; rank 0 sums up the others.
    """

    def __init__(self, target: Target, environment: Environment, write: Write) -> None:
        self.target = target
        self._environment, self._write = environment, write
        self._written, self._cancelled = Event(), Event()
        self._problem: BaseException | None = None
        # Not a daemon: Python waits for it at the end, so that the last checkpoint is completed.
        self._thread = Thread(target=self._run, name=f"save {target.name}", daemon=False)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing left to do."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str:
        """What went wrong on this rank so far."""
        return "" if self._problem is None else str(self._problem) or type(self._problem).__name__

    def require_part(self) -> None:
        """Wait until this rank's part is on disk.

        Raises:
            BrokenFile: it could not be written.
        """
        self._written.wait()
        if self._problem is not None:
            raise self._problem

    def require_published(self) -> None:
        """Wait until this rank has nothing left to do.

        Raises:
            BrokenFile: the checkpoint could not be completed.
        """
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def cancel(self) -> None:
        """Give the checkpoint up, and wait until this rank has."""
        self._cancelled.set()
        self._thread.join()
        if self._environment.is_main:
            folder.discard(self.target.directory, self.target.name)

    def _run(self) -> None:
        try:
            self._write_part()
            self._written.set()
            if self._environment.is_main and self._all_parts_are_there():
                self._publish()
        except OSError as problem:
            self._problem = unwritable(self.target.path, problem)
        except BaseException as problem:
            self._problem = problem
        finally:
            if self._problem is not None:
                self._tell_others()
            self._written.set()

    def _tell_others(self) -> None:
        """Leave word that this rank's part will not come: rank 0 may be past the script's end, where nobody asks."""
        with suppress(OSError):
            self._given_up(self._environment.rank).touch()

    def _write_part(self) -> None:
        sums = self._write(self.target.temporary)
        note = self._note(self._environment.rank)
        unseen = note.with_suffix(".tmp")
        unseen.write_text(json.dumps({name: asdict(one) for name, one in sums.items()}))
        os.replace(unseen, note)

    def _all_parts_are_there(self) -> bool:
        """Wait for every rank's note; False where the checkpoint is given up meanwhile."""
        notes = [self._note(rank) for rank in range(self._environment.world_size)]
        size, since = -1, time.monotonic()
        while not all(note.exists() for note in notes):
            if self._cancelled.wait(_LOOK_SECONDS):
                return False
            failed = [rank for rank in range(len(notes)) if self._given_up(rank).exists()]
            if failed:
                late = ", ".join(map(str, failed))
                raise BrokenFile(self.target.path, f"rank {late} could not write its part", "see what it printed")
            now_there = size_of(self.target.temporary)
            if now_there != size:
                size, since = now_there, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                late = ", ".join(str(rank) for rank, note in enumerate(notes) if not note.exists())
                problem = f"rank {late} wrote no part of it"
                raise BrokenFile(self.target.path, problem, "name a directory that all ranks share")
        return True

    def _publish(self) -> None:
        temporary = self.target.temporary
        sums: dict[str, FileSum] = {}
        for rank in range(self._environment.world_size):
            note = self._note(rank)
            sums |= {name: FileSum(**one) for name, one in json.loads(note.read_text()).items()}
            note.unlink()
        for path in sorted(temporary.rglob("*")):
            name = path.relative_to(temporary).as_posix()
            if path.is_file() and name not in sums:
                sums[name] = sum_of(path)
        folder.write_text(temporary / checksums.FILE, checksums.text_of(sums))
        folder.publish(self.target.directory, self.target.name, self.target.keep_last)

    def _given_up(self, rank: int) -> Path:
        return self._note(rank).with_suffix(".failed")

    def _note(self, rank: int) -> Path:
        return self.target.temporary / f"part-{rank:05d}.json"


def size_of(directory: Path) -> int:
    """Bytes of the files in a directory where others write, and rename what they have written."""
    size = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def unwritable(path: Path, problem: OSError) -> BrokenFile:
    """A directory that cannot be written, in one line."""
    reason = problem.strerror or str(problem)
    return BrokenFile(path, f"cannot be written ({reason})", "make room, or name another directory")
