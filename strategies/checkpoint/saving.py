"""Save a checkpoint: planned by all ranks together, then written by each of them, in the background if requested.

To an object store each rank writes files into a folder of its own on a local disk, and sends them from there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any
from weakref import WeakMethod

import torch
from torch.distributed.checkpoint.state_dict_saver import save as plan_tensors

from hardware_db.notices import notice
from strategies.checkpoint import content, retention, safefile
from strategies.checkpoint.object_store import ObjectPath, Unreachable
from strategies.checkpoint.outbox import Outbox, Part, SharedFolder, Staging
from strategies.checkpoint.parts import ALL, SavePlanner
from strategies.checkpoint.safefile import FileSum, sum_of
from strategies.checkpoint.storage import RankFile, Writer, carried_out
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import BrokenFile, DsplanError
from strategies.variables import STAGING

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
    """Runs `write` with a folder on this rank, and on rank 0 the publication after all ranks' parts.

    Each rank has a thread; they synchronize through the folder, or the store, not the network.
    `write` returns the sums of the files it has written as far as it knows them; rank 0 sums up the others.
    """

    def __init__(
        self,
        target: Target,
        environment: Environment,
        write: Write,
        part: Part | None = None,
        completed: Callable[[Path], object] | None = None,
    ) -> None:
        self.target = target
        self._environment, self._write, self._completed = environment, write, completed
        self._part = part or SharedFolder(target.temporary)
        self._in_files, self._written, self._cancelled = Event(), Event(), Event()
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

    def wait_for_files(self) -> None:
        """Wait until this rank's part is in files of this machine, or was given up."""
        self._in_files.wait()

    def require_part(self) -> None:
        """Wait until this rank's part is on disk, or in the store.

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
                if self._completed is not None:
                    self._completed(self.target.path)
        except OSError as problem:
            self._problem = unwritable(self.target.path, problem)
        except BaseException as problem:
            self._problem = problem
        finally:
            try:
                self._part.close()
                if self._problem is not None:
                    self._notify_others()
            finally:
                self._in_files.set()
                self._written.set()

    def _notify_others(self) -> None:
        """Leave word that this rank's part will not come: rank 0 may be past the script's end, where nobody asks."""
        try:
            self._part.leave_note(_given_up(self._environment.rank), "")
        except FileNotFoundError:
            return  # rank 0 has given it up already
        except (OSError, Unreachable) as problem:
            why = problem.strerror if isinstance(problem, OSError) else "nor can it be told"
            notice(f"{self.target.path}: rank 0 waits for a part that will not come ({why})")

    def _write_part(self) -> None:
        sums = dict(self._write(self._part.folder))
        self._in_files.set()
        if not self._part.is_shared:
            self._add_rest(sums)
            self._part.flush()
        text = json.dumps({name: asdict(file_sum) for name, file_sum in sums.items()})
        self._part.leave_note(_note(self._environment.rank), text)

    def _all_parts_are_there(self) -> bool:
        """Wait for every rank's note; return False where the checkpoint is given up meanwhile."""
        ranks = range(self._environment.world_size)
        size, begun = -1, time.monotonic()
        since = begun
        while late := [rank for rank in ranks if _note(rank) not in (sizes := self._part.sizes())]:
            if self._cancelled.wait(self._part.pause(time.monotonic() - begun)):
                return False
            failed = [rank for rank in ranks if _given_up(rank) in sizes]
            if failed:
                problem = f"rank {_numbers(failed)} could not write its part"
                raise BrokenFile(self.target.path, problem, "see what it printed")
            now_there = sum(sizes.values())
            if now_there != size:
                size, since = now_there, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                problem = f"rank {_numbers(late)} wrote no part of it"
                raise BrokenFile(self.target.path, problem, "name a directory that all ranks share")
        return True

    def _publish(self) -> None:
        notes = [_note(rank) for rank in range(self._environment.world_size)]
        sums = {
            name: FileSum(**file_sum)
            for note in notes
            for name, file_sum in json.loads(self._part.read_note(note)).items()
        }
        self._part.remove_notes(notes)
        if self._part.is_shared:
            self._add_rest(sums)
        self._part.complete(safefile.text_of(sums))
        retention.publish(self.target.directory, self.target.name, self.target.keep_last)

    def _add_rest(self, sums: dict[str, FileSum]) -> None:
        """Sum up what was written and not summed, and send it."""
        folder = self._part.folder
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name not in sums and path.is_file():
                sums[name] = sum_of(path)
                self._part.send(name)


def _note(rank: int) -> str:
    """Return the name of the note that a rank leaves when its part is there."""
    return f"part-{rank:05d}.json"


def _given_up(rank: int) -> str:
    """Return the name of the note that a rank leaves when its part will not come."""
    return f"part-{rank:05d}.failed"


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


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
    copies: bool = True
    """Where that is so: from a copy in host memory; else from files on a local disk, which wait for a store."""
    custom: Callable[[Path], object] | None = None
    """A function of the folder to write to, which replaces the tensors."""
    trainable_only: bool = False
    """Leaves out frozen weights."""
    completed: Callable[[Path], object] | None = None
    """Called on rank 0 with the path when the checkpoint is complete, by the thread that has completed it."""


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
        self._staging: Staging | None = None
        self._waits_at_exit = False

    def write(self, directory: Path, what: Saved, options: SaveOptions) -> Path:
        """Write one checkpoint and return the path that it has when it is complete.

        Raises:
            BrokenFile: this one, or the one before it, cannot be written; those that are there are as they were.
            CannotRun: something in it cannot be saved.
        """
        self.wait()
        target = self._target(directory, what.step, options.keep_last)
        part: Part | None = None
        try:
            text = everywhere(what.state)
            part = everywhere(lambda: self._part(target))
            if options.custom is None:
                write = self._plan(target, part, everywhere(what.tensors), options)
            else:
                write = _let_write(options.custom, target, part)
        except BaseException:
            if part is not None:
                part.close()
            self._discard(target)
            raise
        if self._environment.is_main:
            write = _with_text(write, text)
        self._wait_at_exit()
        self._writing = Writing(target, self._environment, write, part, options.completed)
        if not options.asynchronous:
            self.wait()
        elif not options.copies:
            self._writing.wait_for_files()
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

    def _part(self, target: Target) -> Part:
        """Return where this rank writes.

        Raises:
            BrokenFile: there is no room for files that wait.
        """
        if not isinstance(target.directory, ObjectPath):
            return SharedFolder(target.temporary)
        try:
            if self._staging is None:
                self._staging = Staging(self._environment.local_world_size)
            return Outbox(target.path, self._staging)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            where = os.environ.get(STAGING) or tempfile.gettempdir()
            line = f"checkpoints cannot wait there ({reason})"
            raise BrokenFile(where, line, f"name a directory by {STAGING}") from None

    def _plan(self, target: Target, part: Part, tensors: dict[str, Any], options: SaveOptions) -> Write:
        """Plan which bytes this rank writes; in the background, from a copy of them."""
        writer = Writer(self._environment.rank, part.file_bytes)
        carried_out(target.path, lambda: plan_tensors({ALL: tensors}, storage_writer=writer, planner=SavePlanner()))
        files, index = writer.files, json.dumps(writer.index)
        copies = self._copy(files) if options.asynchronous and options.copies else [None] * len(files)

        def write(temporary: Path) -> Mapping[str, FileSum]:
            if self._environment.is_main:
                retention.write_text(temporary / content.TENSORS, index)
            sums = {}
            for file, copied in zip(files, copies, strict=True):
                part.make_room(file.bytes)
                sums[file.name] = file.write_to(temporary, copied, durable=part.is_shared)
                part.send(file.name)
            return sums

        return write

    def _copy(self, files: Sequence[RankFile]) -> list[torch.Tensor | None]:
        """Copy all that this rank writes to host memory, which stays for the next time."""
        sizes = [file.bytes for file in files]
        if self._buffer is None or self._buffer.numel() < sum(sizes):
            on_device = self._environment.device.type == "cuda"
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        copies = torch.split(self._buffer[: sum(sizes)], sizes)
        for file, copied in zip(files, copies, strict=True):
            file.copy_to(copied)
        if self._environment.device.type == "cuda":
            torch.cuda.synchronize(self._environment.device)
        return [*copies]

    def _wait_at_exit(self) -> None:
        """Have Python wait, before it ends its executors: those that send, and those of a store's own library."""
        if self._waits_at_exit:
            return
        self._waits_at_exit = True
        last_words = WeakMethod(self._last_words)

        def call() -> None:
            if (method := last_words()) is not None:
                method()

        with suppress(RuntimeError):  # Python is ending already
            # `atexit` comes later. Executors are ended by this list, from its end on, and are in it: they are imported.
            threading._register_atexit(call)  # type: ignore[attr-defined]

    def _last_words(self) -> None:
        """Print how the last checkpoint went: at the end of the process nobody else asks."""
        if self._writing is not None:
            try:
                self._writing.require_published()
            except DsplanError as problem:
                print(problem, file=sys.stderr)


def _let_write(function: Callable[[Path], object], target: Target, part: Part) -> Write:
    """Let a script's function write, now and on this thread: it reads the weights as they are, and may communicate."""

    def attempt() -> None:
        try:
            function(part.folder)
        except OSError as problem:
            raise unwritable(target.path, problem) from None

    everywhere(attempt)
    return lambda temporary: {}


def _with_text(write: Write, text: str) -> Write:
    def both(temporary: Path) -> Mapping[str, FileSum]:
        retention.write_text(temporary / content.STATE, text)
        return write(temporary)

    return both
