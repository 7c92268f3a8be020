"""The checkpoints of one engine: what `Engine.save_checkpoint` and `Engine.load_checkpoint` do."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from strategies.checkpoint import rng
from strategies.checkpoint.adapters import adapter_of, describe_base, left_out, require_same_base
from strategies.checkpoint.content import STATE, Content, text_of
from strategies.checkpoint.export import export_checkpoint
from strategies.checkpoint.loading import check
from strategies.checkpoint.reading import Damaged, shown
from strategies.checkpoint.restore import as_live
from strategies.checkpoint.saving import Saved, SaveOptions, Saver, unwritable
from strategies.checkpoint.states import Inventory, States, load_extra, together
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.errors import BrokenFile
from strategies.parallel.mesh import Mesh
from strategies.parallel.whole import gathered
from strategies.protocols import TrainingEngine


class CheckpointedEngine(TrainingEngine, Protocol):
    """An engine whose state can be written down and gone back to."""

    supervision: Any

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks that split the model."""
        ...

    def _states(self) -> States: ...

    def _progress(self) -> dict[str, Any]: ...

    def _resume(self, progress: Mapping[str, Any]) -> None: ...


class Checkpoints(Saver):
    """Saves and restores one engine; every rank calls every method together."""

    def __init__(self, engine: CheckpointedEngine) -> None:
        super().__init__(engine.environment)
        self._engine = engine

    def save(self, directory: Path, client_state: Mapping[str, Any], options: SaveOptions) -> Path:
        """Write one checkpoint and return its path; `write` says what it raises."""
        engine = self._engine
        states = self._states()
        states.leaves_out = left_out(states, trainable_only=options.trainable_only)
        content = Content(
            progress={**engine._progress(), **_surroundings(engine)},
            client_state=dict(client_state),
            model_files=model_files_of(engine.module),
            written_by=_written_by(engine),
            is_custom=options.custom is not None,
            adapter=adapter_of(engine.module, states.names.tensors, engine.mesh),
            left_out=describe_base(states, states.leaves_out, engine.environment),
        )

        def tensors() -> dict[str, Any]:
            with torch.no_grad():
                return {**states.tensors(), **rng.tensors(engine.environment.rank)}

        def state() -> str:
            if content.is_custom:
                return text_of(content)
            whole = states.describe()
            aliases, extra = dict(whole.aliases), dict(whole.extra)
            return text_of(replace(content, optimizer=dict(whole.optimizer), aliases=aliases, extra=extra))

        what = Saved(step=engine.global_steps, tensors=tensors, state=state)
        return self.write(directory, what, options)

    def load(self, directory: Path) -> tuple[Path | None, dict[str, Any]]:
        """Restore the latest checkpoint; return its path and client state, or (None, {}) where there is none.

        All is read and checked on all ranks before anything of the engine changes.
        """
        self.wait()
        engine = self._engine
        states = self._states()
        own = _OwnState(engine, states.names.extra)
        checked = check(directory, states, engine.environment, own.require)
        if checked is None:
            return None, {}
        path, content = checked.path, checked.content
        if content.left_out:
            here = describe_base(states, left_out(states, trainable_only=True), engine.environment)
            everywhere(lambda: require_same_base(path, content.left_out, here))
        try:
            everywhere(lambda: own.take_over(path, content))
        except BaseException:
            own.give_back()
            raise
        checked.take_over()
        engine._resume(content.progress)
        if engine.dataloader is not None and content.progress.get("data") is not None:
            engine.dataloader.load_state_dict(content.progress["data"])
        return path, content.client_state

    def export(
        self, directory: Path, dtype: str | None, max_shard_bytes: int | None, *, merged: bool = False
    ) -> list[Path]:
        """Write the weights alone, from every rank, and turn them into a transformers folder, or PEFT's, on rank 0."""
        engine, states = self._engine, self._states()
        adapter = adapter_of(engine.module, states.names.tensors, engine.mesh)
        if adapter and not merged:
            states.leaves_out = frozenset(states.names.tensors.keys() - adapter["names"].keys())
        content = Content(progress={}, client_state={}, model_files=model_files_of(engine.module), adapter=adapter)
        between = directory / ".weights"
        what = Saved(step=engine.global_steps, tensors=states.weights, state=lambda: text_of(content))

        def convert() -> list[Path]:
            try:
                return export_checkpoint(
                    between, directory, dtype=dtype, max_shard_bytes=max_shard_bytes, merged=merged
                )
            except OSError as problem:
                raise unwritable(directory, problem) from None
            finally:
                shutil.rmtree(between, ignore_errors=True)

        self.write(between, what, SaveOptions())
        return on_rank_zero(convert)

    def _states(self) -> States:
        """Return the engine's module and optimizer, and what ranks with different parts of the model have together."""
        engine = self._engine
        if engine.mesh.is_data_parallel:
            return engine._states()

        def own() -> tuple[States, Inventory]:
            states = engine._states()
            return states, states.inventory()

        states, inventory = everywhere(own)
        states.whole = together(gathered(inventory, engine.mesh))
        return states


class _OwnState:
    """State of the script's own objects, which may refuse it: the scheduler's and the modules'."""

    def __init__(self, engine: CheckpointedEngine, extra: Mapping[str, Any]) -> None:
        self._engine, self._scheduler = engine, engine.lr_scheduler
        self._extra_before = extra
        self._before: dict[str, Any] | None = None

    def require(self, path: Path, content: Content) -> None:
        """Check what can be checked before it is handed over.

        Raises:
            DsplanError: the scheduler is another one, or the data is.
        """
        self._scheduler_state(path, content)
        data = content.progress.get("data")
        if self._engine.dataloader is not None and data is not None:
            self._engine.dataloader.require_state(data)

    def take_over(self, path: Path, content: Content) -> None:
        """Hand over the states.

        Raises:
            Damaged: one of them is refused.
        """
        new = self._scheduler_state(path, content)
        before = None if new is None or self._scheduler is None else self._scheduler.state_dict()
        self._before = copy.deepcopy({"scheduler": before, "extra": dict(self._extra_before) if content.extra else {}})
        what = "the scheduler"
        try:
            if new is not None and self._scheduler is not None:
                self._scheduler.load_state_dict(new)
            what = "set_extra_state of a module"
            load_extra(self._engine.module, content.extra)
        except Exception as problem:
            # Whatever the script's own code raises about a state that it once gave.
            line = f"{type(problem).__name__}: {problem}"
            raise Damaged(path / STATE, f"{what} does not take its state ({line})") from problem

    def give_back(self) -> None:
        """Undo `take_over`: another state was refused, or another rank refused its own."""
        if self._before is None:
            return
        if self._before["scheduler"] is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(self._before["scheduler"])
        load_extra(self._engine.module, self._before["extra"])

    def _scheduler_state(self, path: Path, content: Content) -> dict[str, Any] | None:
        """Return the scheduler's state in the form of the live one's, or None if there is none."""
        saved = content.progress.get("scheduler")
        if self._scheduler is None or saved is None:
            return None
        try:
            state = as_live(self._scheduler.state_dict(), saved)
        except ValueError as problem:
            remedy = "build the one that was saved, or set engine.lr_scheduler = None before load_checkpoint"
            raise BrokenFile(path / STATE, f"its scheduler is not this one: {problem}", remedy) from None
        steps = state.get("last_epoch", 0)
        if type(steps) is not int or not -1 <= steps < 2**53:
            raise Damaged(path / STATE, f"its scheduler has made {shown(steps)} steps")
        return dict(state)


def custom_of(save: Callable[..., object] | None, engine: CheckpointedEngine) -> Callable[[Path], object] | None:
    """Return a script's save function, bound to its engine."""
    return None if save is None else lambda folder: save(engine, folder)


def model_files_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what transformers writes beside a model's weights; empty for every other module."""
    files: dict[str, dict[str, Any]] = {}
    for name, attribute in (("config.json", "config"), ("generation_config.json", "generation_config")):
        to_diff = getattr(getattr(module, attribute, None), "to_diff_dict", None)
        if to_diff is not None:
            files[name] = json.loads(json.dumps(to_diff(), default=str))
    if "config.json" in files:
        files["config.json"]["architectures"] = [type(module).__name__]
    return files


def _surroundings(engine: CheckpointedEngine) -> dict[str, Any]:
    """Return the scheduler, and the place in the data."""
    return {
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "data": None if engine.dataloader is None else engine.dataloader.state_dict(),
    }


def _written_by(engine: CheckpointedEngine) -> dict[str, Any]:
    chosen = engine.configuration
    return {
        "strategy": chosen.strategy,
        "backend": chosen.backend,
        "ranks": engine.environment.world_size,
        "precision": chosen.precision,
        "torch": torch.__version__,
        "made": {} if engine.supervision is None else engine.supervision.mark,
    }
