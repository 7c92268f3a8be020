"""Checkpoints of the torch strategies: whole named parameters through `torch.distributed.checkpoint`.

    directory/latest                     the name of the newest complete checkpoint
    directory/step-00000120/             one checkpoint
        .metadata, *.distcp              model and optimizer, each rank its shards
        state.json                       counters, scaler, scheduler, client_state

A checkpoint is written under a temporary name and renamed when every rank has written its part, then `latest` is
replaced: whoever reads sees the old checkpoint or the new one. Nothing in a checkpoint is unpickled without limits:
`.metadata`, which torch pickles, is read by an unpickler that builds only torch's own metadata classes, tensors are
read with `weights_only`, the rest is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from strategies.agree import on_rank_zero
from strategies.checkpoint_origin import LATEST, STATE
from strategies.checkpoint_parts import PartLoadPlanner, PartSavePlanner
from strategies.checkpoint_reading import SafeReader
from strategies.errors import BrokenFile, CannotRun

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a checkpoint holds beside tensors: the engine's `progress` and the script's `client_state`, both JSON."""

    progress: dict[str, Any]
    client_state: dict[str, Any]


def save(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, content: Content) -> Path:
    """Write one checkpoint of a module and its optimizer from every rank; returns and raises as `save_state`."""
    return save_state(directory, _state_of(module, optimizer), content)


def save_state(directory: Path, state: dict[str, Any], content: Content) -> Path:
    """Write one checkpoint from every rank and return its path; `state` holds `model` and `optimizer` by name.

    Raises:
        CannotRun: `client_state` or the scheduler's state is not JSON.
        BrokenFile: `directory` cannot be written.
    """
    text = _as_json(content)
    final = directory / f"step-{content.progress['global_steps']:08d}"
    temporary = directory / f".{final.name}.tmp"
    _on_rank_0(temporary, lambda: _make_empty(temporary))
    writer = FileSystemWriter(temporary)
    _transfer(final, partial(save_tensors, state, storage_writer=writer, planner=PartSavePlanner()))
    _on_rank_0(final, lambda: _publish(temporary, final, text))
    return final


def load(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Content] | None:
    """Restore the latest checkpoint into module and optimizer; returns and raises as `load_state`."""

    def take_over(state: dict[str, Any]) -> None:
        set_state_dict(
            module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )

    return load_state(directory, lambda metadata: _state_of(module, optimizer), take_over)


def load_state(
    directory: Path, room: Callable[[Metadata], dict[str, Any]], take_over: Callable[[dict[str, Any]], None]
) -> tuple[Path, Content] | None:
    """Read the latest checkpoint into what `room` returns and hand it to `take_over`; None where `directory` has none.

    Raises:
        BrokenFile: `latest` names a checkpoint that is not there, or its parts cannot be read.
    """
    latest = directory / LATEST
    if not latest.is_file():
        return None
    path = directory / latest.read_text().strip()
    content = _read_content(path)
    reader = SafeReader(path)
    state = room(reader.read_metadata())
    _transfer(path, partial(load_tensors, state, storage_reader=reader, planner=PartLoadPlanner()))
    take_over(state)
    return path, content


def _state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(module, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def _transfer(path: Path, move: Callable[..., object]) -> None:
    """Move tensors between ranks and files.

    Raises:
        BrokenFile: with the first rank's reason.
    """
    with warnings.catch_warnings():
        # A process alone needs no group to write a checkpoint; torch remarks on it every time.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            move()
        except CheckpointException as problem:
            reason, _ = next(iter(problem.failures.values()))
            line = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
            remedy = f"the model may have changed, or name another step in {path.parent / LATEST}"
            raise BrokenFile(path, f"cannot be written or read ({line})", remedy) from None


def _read_content(path: Path) -> Content:
    try:
        values = json.loads((path / STATE).read_text())
        return Content(progress=values["progress"], client_state=values["client_state"])
    except (OSError, ValueError, KeyError) as problem:
        raise BrokenFile(
            path / STATE, f"cannot be read ({problem})", f"name an earlier step in {path.parent / LATEST}"
        ) from None


def _as_json(content: Content) -> str:
    try:
        return json.dumps({"progress": content.progress, "client_state": content.client_state}, indent=2) + "\n"
    except TypeError as problem:
        raise CannotRun(
            f"client_state and the scheduler's state must be JSON (numbers, texts, lists, dicts): {problem}"
        ) from None


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(temporary: Path, final: Path, text: str) -> None:
    (temporary / STATE).write_text(text)
    if final.exists():
        # A folder cannot be replaced in one move; `latest` still names it, but its successor is complete and next door.
        shutil.rmtree(final)
    os.rename(temporary, final)
    pointer = final.parent / f".{LATEST}.tmp"
    pointer.write_text(final.name + "\n")
    os.replace(pointer, final.parent / LATEST)


def _on_rank_0(path: Path, work: Callable[[], None]) -> None:
    """Change the file system on rank 0 while the others wait.

    Raises:
        BrokenFile: it cannot be written; on every rank.
    """

    def attempt() -> None:
        try:
            work()
        except OSError as problem:
            raise BrokenFile(path, f"cannot be written ({problem.strerror})", "name another directory") from None

    on_rank_zero(attempt)
