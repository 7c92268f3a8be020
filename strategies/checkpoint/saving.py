"""Save a checkpoint: planned by all ranks together, then written by each of them, in the background if requested."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as plan_tensors

from hardware_db.files import replace_whole
from hardware_db.notices import notice
from strategies.checkpoint import content, retention, safefile
from strategies.checkpoint.parts import ALL, SavePlanner
from strategies.checkpoint.safefile import FileSum, sum_of
from strategies.checkpoint.storage import RankFile, Writer, carried_out
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import BrokenFile, DsplanError

_LOOK_SECONDS = 0.01
"""Between two looks of rank 0 at what the others have written."""
_PATIENCE_SECONDS = 600.0
"""Rank 0 gives a checkpoint up that has not grown for so long."""
Write = Callable[[Path], Mapping[str, FileSum]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Target of a checkpoint: `directory/name` when it is complete; how many of the newest stay (None: all)."""

    directory: Path
    name: str
    keep_last: int | None

    @property
    def path(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        """The folder that is written before."""
        return retention.temporary(self.directory, self.name)


class Writing:
    """Runs `write` with the temporary folder on this rank, and on rank 0 the publication after all ranks' parts.

    Each rank has a thread; they synchronize through the folder, not the network.
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
        """True if this rank has nothing left to do."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str:
        """The reason why this rank failed so far; empty where it did not."""
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
            retention.discard(self.target.directory, self.target.name)

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
                self._notify_others()
            self._written.set()

    def _notify_others(self) -> None:
        """Leave word that this rank's part will not come: rank 0 may be past the script's end, where nobody asks."""
        try:
            self._given_up(self._environment.rank).touch()
        except FileNotFoundError:
            return  # rank 0 has given it up already
        except OSError as problem:
            notice(f"{self.target.path}: rank 0 waits for a part that will not come ({problem.strerror})")

    def _write_part(self) -> None:
        sums = self._write(self.target.temporary)
        note = self._note(self._environment.rank)
        replace_whole(note, json.dumps({name: asdict(file_sum) for name, file_sum in sums.items()}))

    def _all_parts_are_there(self) -> bool:
        """Wait for every rank's note; return False where the checkpoint is given up meanwhile."""
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
            sums |= {name: FileSum(**file_sum) for name, file_sum in json.loads(note.read_text()).items()}
            note.unlink()
        for path in sorted(temporary.rglob("*")):
            name = path.relative_to(temporary).as_posix()
            if path.is_file() and name not in sums:
                sums[name] = sum_of(path)
        retention.write_text(temporary / safefile.FILE, safefile.text_of(sums))
        retention.publish(self.target.directory, self.target.name, self.target.keep_last)

    def _given_up(self, rank: int) -> Path:
        return self._note(rank).with_suffix(".failed")

    def _note(self, rank: int) -> Path:
        return self.target.temporary / f"part-{rank:05d}.json"


def size_of(directory: Path) -> int:
    """Count bytes of the files in a directory where others write, and rename what they have written."""
    size = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def unwritable(path: Path, problem: OSError) -> BrokenFile:
    """Return a directory that cannot be written, in one line."""
    reason = problem.strerror or str(problem)
    return BrokenFile(path, f"cannot be written ({reason})", "make room, or name another directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Options of a save."""

    keep_last: int | None = None
    """How many checkpoints stay; None: all."""
    asynchronous: bool = False
    """In the background."""
    custom: Callable[[Path], object] | None = None
    """A function of the folder to write to, which replaces the tensors."""
    trainable_only: bool = False
    """Leaves out frozen weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Content of a save: the step, a function that makes the tensors, and one for the text of `state.json`."""

    step: int
    tensors: Callable[[], dict[str, Any]]
    state: Callable[[], str]


class Saver:
    """Saves the checkpoints of one engine, one at a time; every rank calls every method together."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._writing: Writing | None = None
        self._buffer: torch.Tensor | None = None

    def write(self, directory: Path, what: Saved, options: SaveOptions) -> Path:
        """Write one checkpoint and return the path that it has when it is complete.

        Raises:
            BrokenFile: this one, or the one before it, cannot be written; those that are there are as they were.
            CannotRun: something in it cannot be saved.
        """
        self.wait()
        target = self._target(directory, what.step, options.keep_last)
        try:
            text = everywhere(what.state)
            if options.custom is None:
                write = self._plan(target, everywhere(what.tensors), options)
            else:
                write = _let_write(options.custom, target)
        except BaseException:
            self._discard(target)
            raise
        if self._environment.is_main:
            write = _with_text(write, text)
        if self._writing is None:
            atexit.register(self._last_words)
        self._writing = Writing(target, self._environment, write)
        if not options.asynchronous:
            self.wait()
        return target.path

    @property
    def is_written(self) -> bool:
        """True if this rank has nothing left to do for the last checkpoint; on rank 0, if it is complete."""
        return self._writing is None or self._writing.is_over

    @property
    def problem(self) -> str:
        """The reason why this rank's part of the last checkpoint failed, as far as known; empty where it did not."""
        return "" if self._writing is None else self._writing.problem

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete.

        Raises:
            BrokenFile: it could not be completed, on any rank; raised on every rank.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        atexit.unregister(self._last_words)
        try:
            everywhere(writing.require_part)
        except BaseException:
            writing.cancel()
            raise
        try:
            on_rank_zero(writing.require_published)
        except BaseException:
            self._discard(writing.target)
            raise

    def _discard(self, target: Target) -> None:
        if self._environment.is_main:
            retention.discard(target.directory, target.name)

    def _target(self, directory: Path, step: int, keep_last: int | None) -> Target:
        def make_room() -> str:
            try:
                return retention.begin(directory, step)
            except OSError as problem:
                raise unwritable(directory, problem) from None

        return Target(directory=directory, name=on_rank_zero(make_room), keep_last=keep_last)

    def _plan(self, target: Target, tensors: dict[str, Any], options: SaveOptions) -> Write:
        """Plan which bytes this rank writes; in the background, from a copy of them."""
        writer = Writer(self._environment.rank)
        carried_out(target.path, lambda: plan_tensors({ALL: tensors}, storage_writer=writer, planner=SavePlanner()))
        file, index = writer.file, json.dumps(writer.index)
        copied = self._copy(file) if options.asynchronous else None

        def write(temporary: Path) -> Mapping[str, FileSum]:
            if self._environment.is_main:
                retention.write_text(temporary / content.TENSORS, index)
            return {file.name: file.write_to(temporary, copied)}

        return write

    def _copy(self, file: RankFile) -> torch.Tensor:
        """Copy all that this rank writes to host memory, which stays for the next time."""
        if self._buffer is None or self._buffer.numel() < file.bytes:
            on_device = self._environment.device.type == "cuda"
            self._buffer = torch.empty(file.bytes, dtype=torch.uint8, pin_memory=on_device)
        copied = self._buffer[: file.bytes]
        file.copy_to(copied)
        if self._environment.device.type == "cuda":
            torch.cuda.synchronize(self._environment.device)
        return copied

    def _last_words(self) -> None:
        """Print how the last checkpoint went: at the end of the process nobody else asks."""
        if self._writing is not None:
            try:
                self._writing.require_published()
            except DsplanError as problem:
                print(problem, file=sys.stderr)


def _let_write(function: Callable[[Path], object], target: Target) -> Write:
    """Let a script's function write, now and on this thread: it reads the weights as they are, and may communicate."""

    def attempt() -> None:
        try:
            function(target.temporary)
        except OSError as problem:
            raise unwritable(target.path, problem) from None

    everywhere(attempt)
    return lambda temporary: {}


def _with_text(write: Write, text: str) -> Write:
    def both(temporary: Path) -> Mapping[str, FileSum]:
        retention.write_text(temporary / content.STATE, text)
        return write(temporary)

    return both
