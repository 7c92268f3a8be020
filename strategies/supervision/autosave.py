"""Checkpoints that the ranks save by themselves, as the options say; the last two of a run stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from hardware_db.probe.cgroup import cgroup_limits
from strategies.checkpoint import retention
from strategies.checkpoint.checkpoints import CheckpointedEngine, Checkpoints
from strategies.checkpoint.object_store import ObjectPath, Unreachable
from strategies.checkpoint.saving import SaveOptions
from strategies.distributed.consensus import objects_of_all
from strategies.supervision import lineage
from strategies.supervision.autosave_interval import Interval, SaveClock
from strategies.telemetry.alerts import Alert, post

_SPARE = 2.0
"""Host memory that must be free for a copy of what a node's ranks save, in sizes of that copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """A rank's report at a look: its clock, whether it is worth saving, how its last save went."""

    now: float
    is_clean: bool
    may_save: bool
    has_room: bool
    is_written: bool
    problem: str
    save_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTarget:
    """The directory in which a run saves, and which of its checkpoints count."""

    directory: Path
    interval: Interval
    attempt: int = 0
    run_id: str = ""
    since: int = 0
    """The first attempt whose checkpoints count."""
    has_nodes: bool = False
    """Whether the run has nodes that come and go."""


class SupervisedEngine(CheckpointedEngine, Protocol):
    """An engine that is saved, resumed and stopped from outside its script."""

    @property
    def _checkpoints(self) -> Checkpoints: ...


class AutomaticSaves:
    """Saves one engine's checkpoints when it is time. Every rank has one and calls its methods together.

    `complete` is the last checkpoint of the run that is known to be complete, and `seconds` what saving it took, until
    it was seen to be complete; None before the first.
    """

    def __init__(
        self,
        engine: SupervisedEngine,
        target: SaveTarget,
        *,
        run_directory: Path,
        is_clean: Callable[[], bool],
        may_save: Callable[[], bool],
    ) -> None:
        self._engine, self._target, self._run_directory = engine, target, run_directory
        self._is_clean, self._may_save = is_clean, may_save
        self._clock = SaveClock(target.interval, step=engine.global_steps)
        self._report_line = False
        self._has_room: bool | None = None
        self._is_saving = False
        self._begun: lineage.RunCheckpoint | None = None
        self._save_seconds: float | None = None
        self.complete: lineage.RunCheckpoint | None = None
        self.seconds: float | None = None

    @property
    def mark(self) -> dict[str, Any]:
        """The origin of a checkpoint that is begun now, in the words of `lineage.RunCheckpoint`."""
        return {"run": self._target.run_id, "attempt": self._target.attempt, "is_automatic": self._is_saving}

    def resumed(self, checkpoint: lineage.RunCheckpoint) -> None:
        """Count from a checkpoint of the run, from which training resumes."""
        self.complete = checkpoint
        self._clock = SaveClock(self._target.interval, step=checkpoint.step)

    def step_ended(self, step: int) -> None:
        """Look at the clock where it is time to look, and save where it is time to save."""
        if step < self._clock.next_look or not self._target.interval.is_set:
            return
        looks = self._look()
        if self._begun is not None and (looks[0].is_written or any(look.problem for look in looks)):
            self.finish()
        is_due = self._clock.is_due(step, looks[0].now, looks[0].save_seconds) and looks[0].may_save
        if (change := self._clock.change(looks[0].save_seconds)) and self._engine.is_main:
            notice(change)
        if is_due and all(look.is_clean for look in looks):
            begun = time.monotonic()
            self.finish()
            has_room = all(look.has_room for look in looks)
            is_store = isinstance(self._target.directory, ObjectPath)
            if self.save(asynchronous=has_room or is_store, copies=has_room) is not None:
                self._save_seconds = time.monotonic() - begun

    def save(self, *, asynchronous: bool, copies: bool = True) -> Path | None:
        """Save now. Return None if that was not possible, which is reported and does not end the training."""
        begun = time.time()
        options = SaveOptions(
            asynchronous=asynchronous,
            copies=copies,
            trainable_only=self._engine.checkpointing.trainable_only,
            completed=partial(self.completed, self._row(Path(), is_automatic=True, since=begun)),
        )
        self._is_saving = True
        source = self._engine.client_state_source
        try:
            state = self._engine.client_state if source is None else source()
            path = self._engine._checkpoints.save(self._target.directory, state, options)
        except DsplanError as problem:
            self.failed(problem)
            return None
        finally:
            self._is_saving = False
        self._begun = self.note(path, is_automatic=True, since=begun)
        self._clock.saved()
        if not asynchronous:
            self._written()
        return path

    def finish(self) -> None:
        """Wait for the automatic checkpoint that is on its way, if any; that it failed is reported, not raised."""
        if self._begun is None:
            return
        try:
            self._engine._checkpoints.wait()
        except DsplanError as problem:
            self.failed(problem)
        else:
            self._written()

    def script_saved(self, path: Path) -> None:
        """Count from a checkpoint that the script has begun by itself; the last of ours is complete."""
        if self._begun is not None:
            self._written()
        self.complete = self.note(path)
        self._clock.saved()

    def failed(self, problem: DsplanError) -> None:
        """Report that a checkpoint could not be written, once until one can."""
        self._begun = None
        self._clock.failed()
        if not self._report_line and self._engine.is_main:
            message = f"{problem}; training continues, the checkpoint before stays, and saving is tried again"
            post(Alert(kind="checkpoint", metric="checkpoint", message=message, step=self._engine.global_steps))
        self._report_line = True

    def note(self, path: Path, *, is_automatic: bool = False, since: float | None = None) -> lineage.RunCheckpoint:
        """Remember a checkpoint that was begun; a full disk makes a later resume begin earlier and ends nothing."""
        checkpoint = self._row(path, is_automatic=is_automatic, since=since)
        if self._engine.environment.local_rank == 0:
            try:
                lineage.note(self._run_directory, checkpoint)
            except OSError as problem:
                unlisted = f"the checkpoint of step {checkpoint.step} is not listed"
                notice(f"{self._run_directory}: {unlisted} ({problem.strerror})")
        return checkpoint

    def _row(self, path: Path, *, is_automatic: bool, since: float | None) -> lineage.RunCheckpoint:
        return lineage.RunCheckpoint(
            path=str(path.absolute()),
            step=self._engine.global_steps,
            attempt=self._target.attempt,
            is_automatic=is_automatic,
            time=since or time.time(),
            run=self._target.run_id,
        )

    def _written(self) -> None:
        assert self._begun is not None
        self.complete, self._begun = self._begun, None
        self.seconds = time.time() - self.complete.time
        if self._engine.is_main:
            if self._report_line:
                notice("checkpoints can be written again")
            if not isinstance(self._target.directory, ObjectPath):
                self._clear_away(lineage.read(self._run_directory))
        self._report_line = False

    def completed(self, row: lineage.RunCheckpoint | None, path: Path) -> None:
        """List that a checkpoint in a store is complete, and clear away what an automatic one, of a `row`, replaces.

        The thread calls it that has completed it: the one that trains waits for no store.
        """
        if not isinstance(path, ObjectPath):
            return
        try:
            lineage.note_complete(self._run_directory, str(path))
            if row is not None:  # which may not be listed yet
                self._clear_away([*lineage.read(self._run_directory), replace(row, path=str(path))])
        except OSError as problem:
            notice(f"{self._run_directory}: that {path} is complete is not listed ({problem.strerror})")
        except Unreachable:
            notice(f"{path} is complete; older ones that are no longer needed could not be listed")

    def _clear_away(self, listed: Sequence[lineage.RunCheckpoint]) -> None:
        """Remove this run's own automatic checkpoints but the newest, whichever node's rank 0 has saved them."""
        run = self._target
        for path in lineage.outdated(listed, retention.KEPT, run=run.run_id, since=run.since, has_nodes=run.has_nodes):
            try:
                retention.remove(path)
            except (OSError, Unreachable) as problem:
                why = problem.strerror if isinstance(problem, OSError) else "the store cannot be used"
                notice(f"{path}: a checkpoint that is no longer needed cannot be removed ({why})")

    def _look(self) -> list[_Look]:
        checkpoints = self._engine._checkpoints
        return objects_of_all(
            _Look(
                now=time.monotonic(),
                is_clean=self._is_clean(),
                may_save=self._may_save(),
                has_room=self._room(),
                is_written=checkpoints.is_written,
                problem=checkpoints.problem,
                save_seconds=self._save_seconds,
            )
        )

    def _room(self) -> bool:
        """Return whether host memory takes a copy of this node's part of the training state."""
        if self._has_room is None:
            if not self._engine.optimizer.state:
                return True  # states are made in the first step; ask again
            tensors = self._engine.state_tensors()
            needed = sum(tensor.nbytes for kind in ("parameters", "optimizer") for tensor in tensors[kind])
            on_node = needed * self._engine.environment.local_world_size
            self._has_room = _free_bytes() > _SPARE * on_node
        return self._has_room


def _free_bytes() -> int:
    """Return the host memory that is free for this process: of the machine, and within its control group."""
    available, left = int(psutil.virtual_memory().available), cgroup_limits().memory_left_bytes
    return available if left is None else min(available, left)
