"""What a checkpoint holds beside tensors: `state.json`, for people and programs, and the list `tensors.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from strategies.checkpoint.folder import STATE
from strategies.errors import BrokenFile, CannotRun

TENSORS = "tensors.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """All of it JSON.

    Attributes:
        progress: the engine's counters, loss scale, scheduler and place in the data.
        client_state: what the script handed over.
        optimizer: its class, its groups (names of parameters and options), and which states are plain numbers.
        aliases: further names of tied tensors, with the name under which they are saved.
        extra: what modules keep beside tensors.
        model_files: what lies beside the weights of a transformers model: its `config.json`, by file name.
        written_by: strategy, backend and number of ranks, for people.
        is_custom: whether a function of the script's wrote the tensors.
    """

    progress: dict[str, Any]
    client_state: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    model_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    written_by: dict[str, Any] = field(default_factory=dict)
    is_custom: bool = False


def text_of(content: Content) -> str:
    """The text of a `state.json`.

    Raises:
        CannotRun: the script's part of it is not JSON.
    """
    try:
        return json.dumps({"format": FORMAT, **asdict(content)}, indent=1) + "\n"
    except TypeError as problem:
        raise CannotRun(
            f"client_state and the scheduler's state must be JSON (numbers, texts, lists, dicts): {problem}"
        ) from None


def read_content(folder: Path) -> Content:
    """The `state.json` of a checkpoint.

    Raises:
        BrokenFile: it is not one, or of another format.
    """
    if (folder / ".metadata").is_file():
        raise BrokenFile(folder, "was written by dsplan before its checkpoints had no pickle", "start from the weights")
    values = _object(folder / STATE)
    if values.pop("format", None) != FORMAT:
        raise BrokenFile(folder / STATE, f"is not of format {FORMAT}", "load it with the dsplan that wrote it")
    try:
        return Content(**values)
    except TypeError as problem:
        raise BrokenFile(folder / STATE, f"is not a checkpoint's state ({problem})", "name another one") from None


def read_index(folder: Path) -> dict[str, Any]:
    """Where every tensor of a checkpoint lies.

    Raises:
        BrokenFile: there is no such list.
    """
    return _object(folder / TENSORS)


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise BrokenFile(path, f"cannot be read ({problem})", "name another checkpoint") from None
    if not isinstance(values, dict):
        raise BrokenFile(path, "does not hold a JSON object", "name another checkpoint")
    return values
