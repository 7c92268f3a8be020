"""Weights in safetensors files: where the elements of a model's whole parameters lie, of whichever layout.

A directory of the Hub's layout (`model.safetensors`, or several with `model.safetensors.index.json`), one file, or a
checkpoint of ours. Names are brought to those of the model; what transformers joins while it loads (experts that lie
one by one in the files) becomes boxes of one tensor, so that a rank reads the experts that it has and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from strategies.checkpoint import retention
from strategies.checkpoint.content import SavedTensor
from strategies.checkpoint.loading import open_checkpoint
from strategies.checkpoint.object_store import ObjectPath
from strategies.checkpoint.reading import Box, Damaged, Stored, header_of, json_object, opened, read_bytes, shown
from strategies.checkpoint.safefile import DTYPES
from strategies.checkpoint.states import MODEL
from strategies.errors import BrokenFile, CannotRun

_ONE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""The Hub's names: all weights, which file has which, and the model's config beside them."""
_LONGEST_INDEX = 2**28
_JOINS = frozenset({"MergeModulelist", "Concatenate"})
"""Steps of transformers' conversions that put tensors side by side and change no element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Tensors of some safetensors files."""

    path: Path
    """As the script named them."""
    index: Mapping[str, SavedTensor]
    """Where every tensor lies, by its name there, or in the model."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Where files lie, links followed (the Hub's cache is full of them), by their names; others are below `path`."""

    @property
    def folder(self) -> Path:
        """The directory that files are named in."""
        return self.path if self.path.is_dir() else self.path.parent

    def place_of(self, file: str) -> tuple[Path, str]:
        """Return the directory and the name by which a file is opened."""
        link = self.files.get(file)
        return (self.folder, file) if link is None else (link.parent, link.name)


def open_weights(path: Path) -> WeightFiles:
    """Read the lists and headers of weights in files, and nothing else of them.

    Raises:
        BrokenFile: there are none, they are damaged, or they are quantised.
    """
    if isinstance(path, ObjectPath):
        checkpoint = retention.named_latest(path)
        if checkpoint is None:
            raise BrokenFile(path, "holds no checkpoint", "name one, or a directory with model.safetensors")
        return _of_checkpoint(checkpoint)
    if path.is_file():
        return _of_files(path, path.parent, [path.name])
    if not path.is_dir():
        raise BrokenFile(path, "is not there", "name a directory with model.safetensors, or a checkpoint")
    _require_plain(path)
    if (path / _INDEX).exists():
        return _of_files(path, path, sorted(set(_weight_map(path).values())))
    if (path / _ONE).exists():
        return _of_files(path, path, [_ONE])
    checkpoint = retention.named_latest(path)
    if checkpoint is not None:
        return _of_checkpoint(checkpoint)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if len(names) != 1:
        there = f"has {len(names)} safetensors files and no {_INDEX}" if names else "has no safetensors files"
        raise BrokenFile(path, there, f"name a directory with {_ONE} or {_INDEX}, or a checkpoint of dsplan's")
    return _of_files(path, path, names)


def _of_checkpoint(checkpoint: Path) -> WeightFiles:
    saved = open_checkpoint(checkpoint)
    if saved.content.is_custom or saved.content.left_out:
        what = "was written by a save function of the script's" if saved.content.is_custom else "holds adapters alone"
        raise BrokenFile(checkpoint, what, "name one with all weights")
    index = {name.removeprefix(MODEL): tensor for name, tensor in saved.index.items() if name.startswith(MODEL)}
    aliases = {alias: index[name] for alias, name in saved.content.aliases.items() if name in index}
    return WeightFiles(path=checkpoint, index={**index, **aliases})


def _require_plain(path: Path) -> None:
    """Refuse weights whose numbers are codes with scales beside them.

    Raises:
        BrokenFile: the config beside them says that they are quantised.
    """
    if not (path / _CONFIG).exists():
        return
    method = _json(path, _CONFIG).get("quantization_config")
    if method:
        word = method.get("quant_method", "a method") if isinstance(method, dict) else method
        raise BrokenFile(path, f"holds weights quantised by {shown(word)}", "convert them to bf16 first")


def _weight_map(path: Path) -> dict[str, str]:
    names = _json(path, _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise Damaged(path / _INDEX, "has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or PurePosixPath(name).name != name:
            raise Damaged(path / _INDEX, f"names a file {shown(name)}, which does not lie beside it")
    return names


def _json(path: Path, name: str) -> dict[str, Any]:
    real = (path / name).resolve()
    return json_object(path / name, read_bytes(real.parent, real.name, _LONGEST_INDEX))


def _of_files(path: Path, directory: Path, names: Iterable[str]) -> WeightFiles:
    index: dict[str, SavedTensor] = {}
    files: dict[str, Path] = {}
    for name in names:
        real = files[name] = (directory / name).resolve()
        with opened(real.parent, real.name) as file:
            for key, stored in header_of(file, directory / name).items():
                if key in index:
                    raise Damaged(directory / name, f"has {shown(key)}, which {index[key].boxes[0].file} has too")
                index[key] = _whole(name, key, stored)
    return WeightFiles(path=path, index=index, files=files)


def _whole(file: str, key: str, stored: Stored) -> SavedTensor:
    box = Box(offsets=(0,) * len(stored.shape), sizes=stored.shape, file=file, key=key)
    return SavedTensor(dtype=stored.dtype, shape=stored.shape, boxes=(box,))


# Names of files and names of the model.


def fit_to(files: WeightFiles, model: nn.Module, required: Iterable[str]) -> WeightFiles:
    """Return the files' tensors by the names of a model, tied ones by each of theirs.

    What the model does not have is left out. The model has no adapters yet.

    Raises:
        BrokenFile: a weight has another shape, or a `required` one is not there.
    """
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if _is_tensor(tensor)}
    index = _named_as_transformers_does(files, model, tensors) or dict(files.index)
    holders: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        holders.setdefault(id(tensor), []).append(name)
    own: dict[str, SavedTensor] = {}
    for names in holders.values():
        saved_name = next((name for name in names if name in index), None)
        if saved_name is not None:
            own.update(dict.fromkeys(names, index[saved_name]))
    for name, saved in own.items():
        if saved.shape != tuple(tensors[name].shape):
            problem = f"has {name} as {list(saved.shape)} and the model as {list(tensors[name].shape)}"
            raise BrokenFile(files.path, problem, "build the model of these weights")
        if DTYPES[saved.dtype].is_floating_point != tensors[name].is_floating_point():
            problem = f"has {name} as {saved.dtype} and the model as {tensors[name].dtype}"
            raise BrokenFile(files.path, problem, "build the model of these weights")
    missing = sorted(set(required) - own.keys())
    if missing:
        near = get_close_matches(missing[0], files.index, n=1, cutoff=0.4)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        like = f" (nearest: {near[0]})" if near else ""
        raise BrokenFile(
            files.path, f"has no weight {missing[0]}{more}{like}", "name its weights, or build those with values"
        )
    return replace(files, index=own)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _named_as_transformers_does(
    files: WeightFiles, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, SavedTensor] | None:
    """Return the tensors by the names that `from_pretrained` gives them; None of a model that is not transformers'."""
    if not hasattr(type(model), "from_pretrained") or not hasattr(model, "base_model_prefix"):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    whole: Any = model
    changes = get_model_conversion_mapping(whole)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    by_pattern = {pattern: change for change in converters for pattern in change.source_patterns}
    index: dict[str, SavedTensor] = {}
    joined: dict[str, dict[str, list[str]]] = {}
    for key in sorted(files.index, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, tensors)
        if pattern is None or name == key:
            index[name] = files.index[key]
        else:
            joined.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, sources in joined.items():
        if name in tensors:
            index[name] = _joined(files, name, sources, by_pattern[next(iter(sources))])
    return index


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Order names by the numbers in them: experts stand in the order in which they are stacked."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _joined(files: WeightFiles, name: str, sources: Mapping[str, Sequence[str]], change: Any) -> SavedTensor:
    """Return the boxes of a tensor that transformers stacks and concatenates from several.

    Raises:
        CannotRun: it does more with them.
    """
    steps = {type(step).__name__: step for step in change.operations}
    if not steps.keys() <= _JOINS or getattr(steps.get("MergeModulelist"), "dim", 0) != 0:
        raise CannotRun(
            f"weights: {files.path} holds {name} in a form that transformers converts ({', '.join(steps)}), which is"
            " not read in parts; save the model once with save_original_format=False, or load it whole"
        )
    lists = [sources[pattern] for pattern in change.source_patterns if pattern in sources]
    parts = [_stacked(files, keys) if "MergeModulelist" in steps else files.index[keys[0]] for keys in lists]
    dim = getattr(steps.get("Concatenate"), "dim", 0)
    boxes: list[Box] = []
    begin = 0
    for part in parts:
        boxes += [_moved(box, dim, begin) for box in part.boxes]
        begin += part.shape[dim]
    shape = (*parts[0].shape[:dim], begin, *parts[0].shape[dim + 1 :])
    return SavedTensor(dtype=parts[0].dtype, shape=shape, boxes=tuple(boxes))


def _stacked(files: WeightFiles, keys: Sequence[str]) -> SavedTensor:
    """Return tensors of one shape as a tensor with one dimension more, which is the first."""
    parts = [files.index[key] for key in keys]
    shape = parts[0].shape
    uneven = next((key for key, part in zip(keys, parts, strict=True) if part.shape != shape), None)
    if uneven is not None:
        raise BrokenFile(files.path, f"has {uneven} as {list(files.index[uneven].shape)} beside others", "name others")
    boxes = [
        Box(offsets=(expert, *box.offsets), sizes=(1, *box.sizes), file=box.file, key=box.key)
        for expert, part in enumerate(parts)
        for box in part.boxes
    ]
    return SavedTensor(dtype=parts[0].dtype, shape=(len(keys), *shape), boxes=tuple(boxes))


def _moved(box: Box, dim: int, by: int) -> Box:
    offsets = (*box.offsets[:dim], box.offsets[dim] + by, *box.offsets[dim + 1 :])
    return Box(offsets=offsets, sizes=box.sizes, file=box.file, key=box.key)


_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def without_adapters(name: str) -> str:
    """Return the name that a weight had before PEFT put an adapter beside it, or a trained copy in its place."""
    return _ADAPTED.sub("", name)
