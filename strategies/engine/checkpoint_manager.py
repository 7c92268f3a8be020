"""The checkpoint manager decides when checkpoints are saved, how many stay, and by which function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from strategies.checkpoint import content
from strategies.engine.base import Engine
from strategies.errors import CannotRun, DsplanError
from strategies.protocols import Observer


class CheckpointManager:
    """Saves an engine's checkpoints below one directory; every rank has one and calls it together.

        manager = dsplan.CheckpointManager(engine, "checkpoints", every_steps=1000, keep_last=5, asynchronous=True)
        manager.load()
        for batch in dataloader:
            ...
            engine.step()
            manager.step()
        manager.close()

    Args:
        every_steps: optimizer steps between checkpoints that `step` saves; None: it saves none.
        keep_last: how many of the newest stay; None: what the config says, else all.
        asynchronous: write in the background; None: what the config says.
        save: `save(engine, folder)`, called on every rank, writes the tensors its own way into `folder`. Publication,
            checksums and `keep_last` are the same; to read it back is the script's, from `latest`.

    Raises:
        CannotRun: a number is below 1.
    """

    def __init__(
        self,
        engine: Engine,
        directory: str | Path,
        *,
        every_steps: int | None = None,
        keep_last: int | None = None,
        asynchronous: bool | None = None,
        save: Callable[[Engine, Path], object] | None = None,
    ) -> None:
        for word, value in (("every_steps", every_steps), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise CannotRun(f"{word}={value} keeps no checkpoint; it must be at least 1")
        self.directory = Path(directory)
        self._engine, self._every, self._save = engine, every_steps, save
        self._keep_last, self._asynchronous = keep_last, asynchronous
        self._saved_at = engine.global_steps

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None if there is none."""
        return content.named_latest(self.directory)

    def step(self, client_state: Mapping[str, Any] | None = None) -> Path | None:
        """Save if it is time; call it after every `engine.step()`. Returns the checkpoint's path, or None."""
        steps = self._engine.global_steps
        if self._every is None or steps == self._saved_at or steps % self._every:
            return None
        return self.save(client_state)

    def save(self, client_state: Mapping[str, Any] | None = None) -> Path:
        """Save now; `Engine.save_checkpoint` says what it raises."""
        self._saved_at = self._engine.global_steps
        return self._engine.save_checkpoint(
            self.directory,
            client_state,
            asynchronous=self._asynchronous,
            keep_last=self._keep_last,
            save=self._save,
        )

    def load(self) -> tuple[Path | None, dict[str, Any]]:
        """Restore the newest; `Engine.load_checkpoint` says what it returns and raises."""
        found = self._engine.load_checkpoint(self.directory)
        self._saved_at = self._engine.global_steps
        return found

    def close(self) -> None:
        """Return when the last checkpoint is complete.

        Raises:
            BrokenFile: it could not be written.
        """
        self._engine.wait_for_checkpoint()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure of one rank the others may never come to wait for it.
        if problem is None:
            self.close()


class SavesByItself(Observer):
    """Saves as the config's `checkpoint` section says, without a call of the script's."""

    def __init__(self, manager: CheckpointManager, engine: Engine) -> None:
        self._manager, self._engine = manager, engine

    def step_ended(self) -> None:
        """Save if it is time; under `dsplan run` what cannot be written is reported and does not end the training."""
        try:
            self._manager.step()
        except DsplanError as problem:
            if self._engine.supervision is None:
                raise
            self._engine.supervision.script_could_not_save(problem)


def saves_of_config(engine: Engine) -> Observer | None:
    """Return the observer that a config's `checkpoint` section asks for, or None if only the script saves.

    Raises:
        CannotRun: it does not say where to.
    """
    how = engine.checkpointing
    if how.every_steps is None:
        return None
    if how.directory is None:
        raise CannotRun("config: checkpoint.every_steps is set and checkpoint.directory is not; name a directory")
    return SavesByItself(CheckpointManager(engine, how.directory, every_steps=how.every_steps), engine)
