"""The checkpoints of one engine: what `Engine.save_checkpoint` and `Engine.load_checkpoint` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strategies.checkpoint import rng
from strategies.checkpoint.content import Content, text_of
from strategies.checkpoint.loading import load
from strategies.checkpoint.saving import Saved, SaveOptions, Saver

if TYPE_CHECKING:
    from strategies.base import Engine


class Checkpoints:
    """Saves and restores one engine; every rank calls every method together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver = Saver(engine.environment)

    def save(self, directory: Path, client_state: Mapping[str, Any], options: SaveOptions) -> Path:
        """Write one checkpoint and return its path; `Saver.save` says what it raises."""
        engine = self._engine
        states = engine._states()
        content = Content(
            progress={**engine._progress(), **_surroundings(engine)},
            client_state=dict(client_state),
            model_config=config_of(engine.module),
            written_by=_written_by(engine),
            is_custom=options.custom is not None,
        )

        def tensors() -> dict[str, Any]:
            with torch.no_grad():
                return {**states.tensors(), **rng.tensors(engine.environment.rank)}

        def state() -> str:
            names = states.names
            described = replace(
                content, optimizer=states.described(), aliases=dict(names.aliases), extra=dict(names.extra)
            )
            return text_of(content if content.is_custom else described)

        what = Saved(step=engine.global_steps, tensors=tensors, state=state)
        return self._saver.save(directory, what, options)

    def load(self, directory: Path) -> tuple[Path | None, dict[str, Any]]:
        """Restore the latest checkpoint; its path and client state, or (None, {}) where there is none."""
        self._saver.wait()
        engine = self._engine
        found = load(directory, engine._states(), engine.environment)
        if found is None:
            return None, {}
        path, content = found
        progress = content.progress
        engine._resume(progress)
        if engine.lr_scheduler is not None and progress.get("scheduler") is not None:
            engine.lr_scheduler.load_state_dict(progress["scheduler"])
        if engine.dataloader is not None and progress.get("data") is not None:
            engine.dataloader.load_state_dict(progress["data"])
        return path, content.client_state

    def wait(self) -> None:
        """Return when the checkpoint that is being written in the background is complete."""
        self._saver.wait()


def custom_of(save: Callable[..., object] | None, engine: Engine) -> Callable[[Path], object] | None:
    """A script's save function, bound to its engine."""
    return None if save is None else lambda folder: save(engine, folder)


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """The `config.json` of a transformers model; None for every other module."""
    config = getattr(module, "config", None)
    to_diff = getattr(config, "to_diff_dict", None)
    if to_diff is None:
        return None
    values: dict[str, Any] = {**to_diff(), "architectures": [type(module).__name__]}
    return values


def _surroundings(engine: Engine) -> dict[str, Any]:
    """The scheduler, and the place in the data."""
    return {
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "data": None if engine.dataloader is None else engine.dataloader.state_dict(),
    }


def _written_by(engine: Engine) -> dict[str, Any]:
    chosen = engine.configuration
    return {
        "strategy": chosen.strategy,
        "backend": chosen.backend,
        "ranks": engine.environment.world_size,
        "precision": chosen.precision,
        "torch": torch.__version__,
    }
