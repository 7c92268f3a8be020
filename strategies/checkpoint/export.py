"""Export: a checkpoint's weights as safetensors files that `from_pretrained` and `safetensors.torch.load_file` read.

One process does it, on the host, one tensor at a time: a model that fits no device can be exported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hardware_db.files import replace_whole, replacement
from strategies.checkpoint import retention
from strategies.checkpoint.adapters import CONFIG_FILE, WEIGHTS_FILE, Written, adapters_alone, merge_into, merged_names
from strategies.checkpoint.content import Content
from strategies.checkpoint.loading import Opened, open_whole
from strategies.checkpoint.object_store import location
from strategies.checkpoint.safefile import DTYPES, Entry, bytes_of, lay_out, write
from strategies.checkpoint.states import MODEL
from strategies.checkpoint.storage import BoxFile
from strategies.errors import BrokenFile, CannotRun

_DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_checkpoint(
    checkpoint: str | Path,
    directory: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    merged: bool = False,
) -> list[Path]:
    """Write a checkpoint's weights to `directory` and return the files, the weights first.

    One `model.safetensors`, or several with an index, as transformers names them; beside them the `config.json` of a
    transformers model. Weights that are tied are there once, under their first name. Of a model with PEFT's adapters
    the adapters alone are written, `adapter_model.safetensors` and `adapter_config.json`, as
    `PeftModel.from_pretrained` reads them.

    Args:
        checkpoint: a checkpoint, or the directory whose latest is meant.
        directory: where the files go.
        dtype: `fp32`, `bf16` or `fp16` for the floating-point weights; None leaves them as they were trained (fp32
            masters).
        max_shard_bytes: a file has at most so many; None: one file.
        merged: write a whole model with the adapters in its weights instead.

    Raises:
        BrokenFile: there is no checkpoint, or it is damaged.
        CannotRun: there is no such dtype, the adapters cannot be merged, or the frozen weights are not there.
    """
    if dtype is not None and dtype not in _DTYPE_NAMES:
        raise CannotRun(f"export: dtype {dtype!r} is not known; take one of {', '.join(_DTYPE_NAMES)}")
    saved = _open(location(checkpoint))
    content = saved.content
    if content.left_out and (merged or not content.adapter):
        raise CannotRun(
            f"export: {saved.path} holds trained weights only (checkpoint.trainable_only); export from the engine"
            " (engine.export), which has the others"
        )
    weights = _Weights(saved, None if dtype is None else _DTYPE_NAMES[dtype])
    weights.choose(merged=merged)
    Path(directory).mkdir(parents=True, exist_ok=True)
    with weights:
        return _write_all(weights, content, Path(directory), max_shard_bytes, merged=merged)


def read_weights(checkpoint: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the whole weights of a checkpoint by every name that they have in the model, and its `client_state`.

    Raises:
        BrokenFile: there is no checkpoint, or it is damaged.
    """
    saved = _open(location(checkpoint))
    with _Weights(saved, None) as weights:
        read = {name: weights.read(name) for name, _, _ in weights.describe()}
    aliases = {alias: read[name] for alias, name in saved.content.aliases.items() if name in read}
    return {**read, **aliases}, saved.content.client_state


def _open(checkpoint: Path) -> Opened:
    path = retention.named_latest(checkpoint)
    if path is None:
        raise BrokenFile(checkpoint, "holds no checkpoint", "name the directory that save_checkpoint wrote to")
    saved = open_whole(path)
    if saved.content.is_custom:
        raise BrokenFile(path, "was written by a save function of the script's", "export it as that function wrote it")
    return saved


class _Weights:
    """The weights of a checkpoint, put together from their boxes when they are asked for."""

    def __init__(self, saved: Opened, dtype: torch.dtype | None) -> None:
        self._path, self._dtype = saved.path, dtype
        self._index = {
            name.removeprefix(MODEL): tensor for name, tensor in saved.index.items() if name.startswith(MODEL)
        }
        self._adapter = saved.content.adapter
        self._chosen = {name: Written(own=name) for name in self._index}
        self._open: dict[str, BoxFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def choose(self, *, merged: bool) -> None:
        """Write a model's adapters, or it whole with them merged, where it has any."""
        if self._adapter:
            self._chosen = merged_names(self._adapter, self._index) if merged else adapters_alone(self._adapter)
            self._chosen = {name: written for name, written in self._chosen.items() if written.own in self._index}

    def describe(self) -> list[tuple[str, torch.dtype, Sequence[int]]]:
        """Return name, dtype and shape of every weight as it will be written."""
        saved = ((name, self._index[written.own]) for name, written in self._chosen.items())
        return [(name, self._written(DTYPES[tensor.dtype]), tensor.shape) for name, tensor in saved]

    def read(self, name: str) -> torch.Tensor:
        """Read one whole weight."""
        written = self._chosen[name]
        whole, merge = self._saved(written.own), written.merge
        if merge is not None:
            magnitude = self._saved(merge["magnitude"]) if merge["magnitude"] else None
            whole = merge_into(whole, merge, self._saved(merge["down"]), self._saved(merge["up"]), magnitude)
        return whole.to(self._written(whole.dtype))

    def _saved(self, own: str) -> torch.Tensor:
        tensor = self._index[own]
        saved = DTYPES[tensor.dtype]
        whole = torch.empty(tensor.shape, dtype=saved)
        for box in tensor.boxes:
            part = whole[tuple(slice(low, low + long) for low, long in zip(box.offsets, box.sizes, strict=True))]
            self._file(box.file).read(box.key, (0,) * len(box.sizes), part)
        return whole

    def _written(self, saved: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and saved.is_floating_point else saved

    def _file(self, name: str) -> BoxFile:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(BoxFile.open(self._path, name))
        return self._open[name]


def _write_all(weights: _Weights, content: Content, directory: Path, limit: int | None, *, merged: bool) -> list[Path]:
    if content.adapter and not merged:
        return _write_adapter(weights, content.adapter["config"], directory)
    shards = _split(weights.describe(), limit)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for name, entries in zip(names, shards, strict=True):
        _write_file(directory / name, weights, entries)
    texts = {name: json.dumps(values, indent=2) + "\n" for name, values in content.model_files.items()}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = _index_text(dict(zip(names, shards, strict=True)))
    for name, text in texts.items():
        replace_whole(directory / name, text, durable=True)
    return [directory / name for name in (*names, *texts)]


def _write_adapter(weights: _Weights, config: Mapping[str, Any], directory: Path) -> list[Path]:
    _write_file(directory / WEIGHTS_FILE, weights, lay_out(weights.describe()))
    replace_whole(directory / CONFIG_FILE, json.dumps(config, indent=2) + "\n", durable=True)
    return [directory / WEIGHTS_FILE, directory / CONFIG_FILE]


def _write_file(path: Path, weights: _Weights, entries: Sequence[Entry]) -> None:
    data = (bytes_of(weights.read(entry.key)) for entry in entries)
    with replacement(path) as temporary:
        write(temporary, entries, data, {"format": "pt"})


def _split(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], limit: int | None) -> list[list[Entry]]:
    """Return the entries of each file: weights in their order, as many as the limit allows, at least one."""
    groups: list[list[tuple[str, torch.dtype, Sequence[int]]]] = [[]]
    filled = 0
    for tensor in tensors:
        size = lay_out([tensor])[0].end
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return [lay_out(group) for group in groups]


def _index_text(files: Mapping[str, Sequence[Entry]]) -> str:
    total = sum(entry.end - entry.begin for entries in files.values() for entry in entries)
    names = {entry.key: name for name, entries in files.items() for entry in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"
