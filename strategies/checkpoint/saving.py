"""Saving: planned by all ranks together, then written by each of them, in the background where that is asked for."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as plan_tensors

from strategies.agree import everywhere, on_rank_zero
from strategies.checkpoint import content, folder
from strategies.checkpoint.parts import ALL, SavePlanner
from strategies.checkpoint.safefile import FileSum
from strategies.checkpoint.storage import RankFile, Writer, carried_out
from strategies.checkpoint.writing import Target, Write, Writing, unwritable
from strategies.environment import Environment
from strategies.errors import DsplanError


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How to save: `keep_last` checkpoints stay (None: all); `asynchronous` in the background; `custom` is a function
    of the folder to write to, which replaces the tensors."""

    keep_last: int | None = None
    asynchronous: bool = False
    custom: Callable[[Path], object] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What is saved: the step, a function that makes the named tensors, and one that makes the text of `state.json`."""

    step: int
    tensors: Callable[[], dict[str, Any]]
    state: Callable[[], str]


class Saver:
    """Saves the checkpoints of one engine, one at a time; every rank calls every method together."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._writing: Writing | None = None
        self._buffer: torch.Tensor | None = None

    def save(self, directory: Path, what: Saved, options: SaveOptions) -> Path:
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
                write = self._planned(target, everywhere(what.tensors), options)
            else:
                write = _written_by(options.custom, target)
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
        """Whether this rank has nothing left to do for the last checkpoint; on rank 0, whether it is complete."""
        return self._writing is None or self._writing.is_over

    @property
    def problem(self) -> str:
        """What this rank's part of the last checkpoint failed at, as far as it is known; empty where it did not."""
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
            folder.discard(target.directory, target.name)

    def _target(self, directory: Path, step: int, keep_last: int | None) -> Target:
        def make_room() -> str:
            try:
                return folder.begin(directory, step)
            except OSError as problem:
                raise unwritable(directory, problem) from None

        return Target(directory=directory, name=on_rank_zero(make_room), keep_last=keep_last)

    def _planned(self, target: Target, tensors: dict[str, Any], options: SaveOptions) -> Write:
        """Which bytes this rank writes; in the background, from a copy of them."""
        writer = Writer(self._environment.rank)
        carried_out(target.path, lambda: plan_tensors({ALL: tensors}, storage_writer=writer, planner=SavePlanner()))
        file, index = writer.file, json.dumps(writer.index)
        copied = self._copy(file) if options.asynchronous else None

        def write(temporary: Path) -> Mapping[str, FileSum]:
            if self._environment.is_main:
                folder.write_text(temporary / content.TENSORS, index)
            return {file.name: file.write_to(temporary, copied)}

        return write

    def _copy(self, file: RankFile) -> torch.Tensor:
        """All that this rank writes, in host memory; the memory stays for the next time."""
        if self._buffer is None or self._buffer.numel() < file.bytes:
            on_device = self._environment.device.type == "cuda"
            self._buffer = torch.empty(file.bytes, dtype=torch.uint8, pin_memory=on_device)
        copied = self._buffer[: file.bytes]
        file.copy_to(copied)
        if self._environment.device.type == "cuda":
            torch.cuda.synchronize(self._environment.device)
        return copied

    def _last_words(self) -> None:
        """At the end of the process nobody else asks how the last checkpoint went."""
        if self._writing is not None:
            try:
                self._writing.require_published()
            except DsplanError as problem:
                print(problem, file=sys.stderr)


def _written_by(function: Callable[[Path], object], target: Target) -> Write:
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
        folder.write_text(temporary / folder.STATE, text)
        return write(temporary)

    return both
