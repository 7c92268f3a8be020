"""Content of a checkpoint beside tensors: `state.json`, for people and programs, and `tensors.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from strategies.checkpoint.reading import (
    DEEPEST,
    LONGEST_TEXT,
    Box,
    Damaged,
    counts,
    is_count,
    is_deep,
    json_object,
    read_bytes,
    shown,
    why_no_cover,
)
from strategies.errors import BrokenFile, CannotRun

STATE = "state.json"
TENSORS = "tensors.json"
FORMAT = 2
MODEL_FILES = frozenset({"config.json", "generation_config.json"})
"""What transformers writes beside a model's weights, and an export may write therefore."""
_PARTS = {"model": 2, "optimizer": 3, "rng": 3}
"""Kinds of tensors and how many parts a name has: `model/<name>`, `optimizer/<state>/<name>`, `rng/<kind>/<rank>`."""


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
        adapter: what an export needs to know of PEFT's adapters (`strategies.checkpoint.adapters`).
        left_out: what the frozen weights were that it leaves out; empty where it has all.
    """

    progress: dict[str, Any]
    client_state: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    model_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    written_by: dict[str, Any] = field(default_factory=dict)
    is_custom: bool = False
    adapter: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint: its dtype (a word of safetensors), its shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


Index = Mapping[str, SavedTensor]


def text_of(content: Content) -> str:
    """Return the text of a `state.json`.

    Raises:
        CannotRun: the script's part of it is not JSON, or more than a checkpoint may have.
    """
    if any(is_deep(part, DEEPEST - 1) for part in (content.client_state, content.progress, content.extra)):
        raise CannotRun(f"client_state and the scheduler's state must not be nested more than {DEEPEST - 1} deep")
    try:
        text = json.dumps({"format": FORMAT, **asdict(content)}, indent=1) + "\n"
    except TypeError as problem:
        raise CannotRun(
            f"client_state and the scheduler's state must be JSON (numbers, texts, lists, dicts): {problem}"
        ) from None
    if len(text) > LONGEST_TEXT:
        raise CannotRun(f"client_state makes {len(text)} bytes of JSON; keep what is long in a file of its own")
    return text


def read_content(folder: Path) -> Content:
    """Read the `state.json` of a checkpoint.

    Raises:
        BrokenFile: it is not one, or of another format.
    """
    require_no_pickles(folder)
    return content_of(folder, read_bytes(folder, STATE))


def require_no_pickles(folder: Path) -> None:
    """Raise `BrokenFile` for a checkpoint that was written before this format."""
    if (folder / ".metadata").is_file():
        raise BrokenFile(folder, "was written by dsplan before its checkpoints had no pickle", "start from the weights")


def content_of(folder: Path, data: bytes) -> Content:
    """Read the bytes of a `state.json`, each part of it of the kind that it has to be.

    Raises:
        BrokenFile: it is not one, or of another format.
    """
    path = folder / STATE
    values = json_object(path, data)
    if values.pop("format", None) != FORMAT:
        raise BrokenFile(path, f"is not of format {FORMAT}", "load it with the dsplan that wrote it")
    kinds = {saved_field.name: bool if saved_field.name == "is_custom" else dict for saved_field in fields(Content)}
    for name, value in values.items():
        if name not in kinds:
            raise Damaged(path, f"is not a checkpoint's state: it has {shown(name)}")
        if not isinstance(value, kinds[name]):
            raise Damaged(path, f"is not a checkpoint's state: its {name} is {_kind(value)}")
    for name in ("progress", "client_state"):
        if name not in values:
            raise Damaged(path, f"is not a checkpoint's state: it has no {name}")
    content = Content(**values)
    problem = _why_no_optimizer(content.optimizer) or _why_no_names(content) or _why_no_adapter(content.adapter)
    if problem:
        raise Damaged(path, problem)
    return content


def require_progress(folder: Path, progress: Mapping[str, Any]) -> None:
    """Check what an engine resumes from: counters, loss scale, and the kinds of the scheduler's and the data's states.

    Raises:
        Damaged: something is missing, or is what no engine saves.
    """
    path = folder / STATE
    for name in ("global_steps", "skipped_steps", "scaler"):
        if name not in progress:
            raise Damaged(path, f"its progress has no {name}")
    for name in ("global_steps", "skipped_steps"):
        if not is_count(progress[name]):
            raise Damaged(path, f"its {name} is {_kind(progress[name])}, which counts nothing")
    for name, kinds in (("scaler", (dict,)), ("scheduler", (dict, type(None))), ("data", (dict, type(None)))):
        if not isinstance(progress.get(name), kinds):
            raise Damaged(path, f"its progress has {_kind(progress.get(name))} as {name}")
    scaler = progress["scaler"]
    if not scaler:
        return
    scale, good, left = (scaler.get(name, 0) for name in ("scale", "_growth_tracker", "overflows_left"))
    if not is_number(scale) or not 0 < scale < math.inf or not is_count(good) or type(left) is not int:
        raise Damaged(path, "its loss scale is none")


def read_index(folder: Path, data: bytes) -> dict[str, SavedTensor]:
    """Return where every tensor of a checkpoint lies, from the bytes of its `tensors.json`.

    Raises:
        Damaged: it does not say that, or the boxes of a tensor are not all of it, each element once.
    """
    path = folder / TENSORS
    tensors = {name: _saved(path, name, entry) for name, entry in json_object(path, data).items()}
    taken: set[tuple[str, str]] = set()
    for name, tensor in tensors.items():
        problem = why_no_cover(tensor.shape, ((box.offsets, box.sizes) for box in tensor.boxes))
        if problem:
            raise Damaged(path, f"{shown(name)}: {problem}")
        for box in tensor.boxes:
            if (box.file, box.key) in taken:
                raise Damaged(path, f"{shown(name)}: {shown(box.key)} of {shown(box.file)} is there twice")
            taken.add((box.file, box.key))
    return tensors


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number, maybe an infinite one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _saved(path: Path, name: str, entry: Any) -> SavedTensor:
    parts = name.split("/", 2)
    if len(parts) < _PARTS.get(parts[0], math.inf) or not all(parts):
        raise Damaged(path, f"{shown(name)} is no tensor of a model, of an optimizer or of random numbers")
    described = entry if isinstance(entry, dict) else {}
    dtype, shape, boxes = described.get("dtype"), counts(described.get("shape")), described.get("boxes")
    if not isinstance(dtype, str) or shape is None or not isinstance(boxes, list):
        raise Damaged(path, f"does not say what {shown(name)} is")
    return SavedTensor(dtype=dtype, shape=shape, boxes=tuple(_box(path, name, box) for box in boxes))


def _box(path: Path, name: str, entry: Any) -> Box:
    described = entry if isinstance(entry, dict) else {}
    offsets, sizes = counts(described.get("offsets")), counts(described.get("sizes"))
    file, key = described.get("file"), described.get("key")
    if offsets is None or sizes is None or not isinstance(file, str) or not isinstance(key, str):
        raise Damaged(path, f"does not say where {shown(name)} lies")
    return Box(offsets=offsets, sizes=sizes, file=file, key=key)


def _why_no_optimizer(optimizer: Mapping[str, Any]) -> str | None:
    """Return what is not as `States.describe` makes it; None where all is."""
    if not isinstance(optimizer.get("class", ""), str):
        return "its optimizer has no class"
    if not _are(optimizer.get("numbers", []), lambda value: isinstance(value, str)):
        return "its optimizer's numbers have no names"
    groups = optimizer.get("groups", [])
    if not _are(groups, lambda value: isinstance(value, dict) and isinstance(value.get("options"), dict)):
        return "its optimizer's groups have no options"
    if not all(_are(group.get("parameters"), lambda name: isinstance(name, str)) for group in groups):
        return "its optimizer's groups have no parameters"
    return None


def _why_no_names(content: Content) -> str | None:
    if not all(isinstance(name, str) for name in content.aliases.values()):
        return "its aliases are no names"
    for name, values in content.model_files.items():
        if name not in MODEL_FILES or not isinstance(values, dict):
            return f"its model_files has {shown(name)}, which no model has beside its weights"
    return None


def _are(values: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(is_one, values))


def _kind(value: Any) -> str:
    return shown(value) if isinstance(value, (bool, int, float, str)) or value is None else f"a {type(value).__name__}"


def _why_no_adapter(adapter: Mapping[str, Any]) -> str | None:
    """Return what is not as `strategies.checkpoint.adapters.adapter_of` makes it; None where all is."""
    if not adapter:
        return None
    config, names, merges = (adapter.get(key) for key in ("config", "names", "merges"))
    if not isinstance(config, dict) or not isinstance(adapter.get("adapter"), str):
        return "its adapter has no config"
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return "its adapter's names are no names"
    kinds: dict[str, Any] = {**dict.fromkeys(("down", "up", "magnitude", "problem"), str), "transposed": bool}
    kinds["scale"] = (int, float)
    for merge in merges.values() if isinstance(merges, dict) else [None]:
        if not isinstance(merge, dict) or not all(isinstance(merge.get(key), kind) for key, kind in kinds.items()):
            return "its adapter's merges are none"
    return None
