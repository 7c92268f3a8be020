"""The checkpoint manager decides when checkpoints are saved, how many stay, and by which function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from strategies.checkpoint import retention
from strategies.checkpoint.object_store import location
from strategies.engine.base import Engine
from strategies.errors import CannotRun, DsplanError
from strategies.protocols import Observer

_SPELLED = {
    "save_dir": "directory",
    "save_interval": "every_steps",
    "keep_interval": "keep_last",
    "async_save": "asynchronous",
}


class CheckpointManager:
    """Saves an engine's checkpoints below one directory; every rank has one and calls it together.

        manager = dsplan.CheckpointManager(engine, "checkpoints", every_steps=1000, keep_last=5, asynchronous=True)
        manager.load()
        for batch in dataloader:
            ...
            engine.step()
            manager.step()
        manager.close()

    Made without an engine, it takes the one that `save` or `load` is given first.

    Args:
        directory: None is what the config says, else "checkpoints".
        every_steps: optimizer steps between checkpoints that `step` saves; None: it saves none.
        keep_last: how many of the newest stay; None: what the config says, else all.
        asynchronous: write in the background; None: what the config says.
        save: `save(engine, folder)`, called on every rank, writes the tensors its own way into `folder`. Publication,
            checksums and `keep_last` are the same; to read it back is the script's, from `latest`.
        spelled: the same under other names: `save_dir`, `save_interval`, `keep_interval`, `async_save`, and
            `save_function(engine, step, path)`, where `path` is this rank's file.

    Raises:
        CannotRun: a number is below 1, or one thing is said twice.
        TypeError: a name is not known.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        directory: str | Path | None = None,
        *,
        every_steps: int | None = None,
        keep_last: int | None = None,
        asynchronous: bool | None = None,
        save: Callable[[Engine, Path], object] | None = None,
        **spelled: Any,
    ) -> None:
        options: dict[str, Any] = {"directory": directory, "every_steps": every_steps, "keep_last": keep_last}
        options |= {"asynchronous": asynchronous, "save": save}
        _respell(options, spelled)
        for word in ("every_steps", "keep_last"):
            if options[word] is not None and options[word] < 1:
                raise CannotRun(f"{word}={options[word]} keeps no checkpoint; it must be at least 1")
        self._directory, self._every = options.pop("directory"), options.pop("every_steps")
        self._options = options
        self._engine: Engine | None = None
        self._saved_at = 0
        if engine is not None:
            self._bind(engine)

    @property
    def directory(self) -> Path:
        """The folder of the checkpoints."""
        of_config = None if self._engine is None else self._engine.checkpointing.directory
        return location(self._directory or of_config or "checkpoints")

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None if there is none."""
        return retention.named_latest(self.directory)

    def step(self, client_state: Mapping[str, Any] | None = None) -> Path | None:
        """Save if it is time; call it after every `engine.step()`. Returns the checkpoint's path, or None."""
        steps = self._bound().global_steps
        if self._every is None or steps == self._saved_at or steps % self._every:
            return None
        return self.save(client_state)

    def save(
        self,
        given: Engine | Mapping[str, Any] | None = None,
        step: int | None = None,
        optimizer: object = None,
        lr_scheduler: object = None,
    ) -> Path:
        """Save now: `save()`, `save(client_state)` or `save(engine, step, optimizer, lr_scheduler)`.

        The last notes the script's `step` in the client state. `Engine.save_checkpoint` says what it raises.

        Raises:
            CannotRun: the optimizer or scheduler is not the engine's.
        """
        state = given if isinstance(given, Mapping) else None
        engine = self._bind(given, optimizer, lr_scheduler) if isinstance(given, Engine) else self._bound()
        if step is not None:
            state = {**(engine.client_state if state is None else state), "step": step}
        self._saved_at = engine.global_steps
        return engine.save_checkpoint(self.directory, state, **self._options)

    def load(
        self,
        path: str | Path | None = None,
        engine: Engine | None = None,
        optimizer: object = None,
        lr_scheduler: object = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Restore the newest, or the checkpoint at `path`; `Engine.load_checkpoint` says what it returns and raises.

        Raises:
            CannotRun: the optimizer or scheduler is not the engine's.
        """
        bound = self._bound() if engine is None else self._bind(engine, optimizer, lr_scheduler)
        path_and_state = bound.load_checkpoint(self.directory if path is None else path)
        self._saved_at = bound.global_steps
        return path_and_state

    def _bind(self, engine: Engine, optimizer: object = None, lr_scheduler: object = None) -> Engine:
        if self._engine not in (None, engine):
            raise CannotRun("CheckpointManager: this is another engine than before; make a manager for each")
        require_parts(engine, optimizer, lr_scheduler, asker="CheckpointManager")
        if self._engine is None:
            self._engine, self._saved_at = engine, engine.global_steps
        return engine

    def _bound(self) -> Engine:
        if self._engine is None:
            raise CannotRun("CheckpointManager: it has no engine yet; give it one, or save(engine, step)")
        return self._engine

    def close(self) -> None:
        """Return when the last checkpoint is complete.

        Raises:
            BrokenFile: it could not be written.
        """
        self._bound().wait_for_checkpoint()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure of one rank the others may never come to wait for it.
        if problem is None:
            self.close()


def require_parts(engine: Engine, optimizer: object, lr_scheduler: object, *, asker: str) -> None:
    """Refuse an optimizer or a scheduler that the engine does not step; None is not looked at.

    Raises:
        CannotRun: naming it.
    """
    for word, given, own in (
        ("optimizer", optimizer, engine.optimizer),
        ("lr_scheduler", lr_scheduler, engine.lr_scheduler),
    ):
        if given is not None and given is not own:
            raise CannotRun(f"{asker}: this {word} is not the engine's; give the one that initialize returned, or none")


def _respell(options: dict[str, Any], spelled: Mapping[str, Any]) -> None:
    """Put arguments of other names among the options."""
    for name, value in spelled.items():
        if name != "save_function" and name not in _SPELLED:
            raise TypeError(f"CheckpointManager() got an unexpected keyword argument {name!r}")
        if value is None:
            continue
        word = _SPELLED.get(name, "save")
        if options[word] is not None:
            raise CannotRun(f"CheckpointManager: {name} and {word} say the same; leave one out")
        options[word] = value if name in _SPELLED else _write_own_file(value)


def _write_own_file(save: Callable[[Engine, int, Path], object]) -> Callable[[Engine, Path], object]:
    """Make of a function that writes one file one that writes into a folder."""
    return lambda engine, folder: save(engine, engine.global_steps, folder / f"rank{engine.environment.rank}.pt")


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
    config = engine.checkpointing
    if config.every_steps is None:
        return None
    if config.directory is None:
        raise CannotRun("config: checkpoint.every_steps is set and checkpoint.directory is not; name a directory")
    return SavesByItself(CheckpointManager(engine, config.directory, every_steps=config.every_steps), engine)
