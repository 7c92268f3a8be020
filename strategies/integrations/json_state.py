"""State of other libraries beside the weights, as JSON: a checkpoint's `client_state` holds no pickles."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from strategies.errors import CannotRun

_TENSOR, _TUPLE, _DICT, _PATH = "__tensor__", "__tuple__", "__dict__", "__path__"
_MARKS = frozenset({_TENSOR, _TUPLE, _DICT, _PATH})


def to_json(value: Any, name: str = "state") -> Any:
    """Return a value as JSON that `from_json` turns back: numbers, texts, lists, tuples, dicts, paths and tensors.

    Raises:
        CannotRun: something in it is of another kind; the message says where.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)  # also those of numpy
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _tensor_to_json(value, name)}
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(item, f"{name}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_json(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {key: to_json(item, f"{name}.{key}") for key, item in value.items()}
        return {_DICT: [[to_json(key, name), to_json(item, f"{name}.{key}")] for key, item in value.items()]}
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return to_json(value.item(), name)
    raise CannotRun(
        f"checkpoint: {name} is a {type(value).__name__}; keep numbers, texts, lists, dicts and tensors in it"
    )


def from_json(value: Any) -> Any:
    """Return what `to_json` was given; tensors are on the CPU."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        mark, content = next(iter(value.items()))
        if mark == _TENSOR:
            return _tensor_from_json(content)
        if mark == _PATH:
            return Path(content)
        if mark == _TUPLE:
            return tuple(from_json(item) for item in content)
        if mark == _DICT:
            return {from_json(key): from_json(item) for key, item in content}
    return {key: from_json(item) for key, item in value.items()}


def _tensor_to_json(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise CannotRun(f"checkpoint: {name} is a {type(tensor).__name__}, which is no plain tensor")
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(whole.view(torch.uint8).numpy().tobytes()).decode(),
    }


def _tensor_from_json(content: Mapping[str, Any]) -> torch.Tensor:
    data, shape = bytearray(base64.b64decode(content["data"])), tuple(content["shape"])
    dtype: torch.dtype = getattr(torch, content["dtype"])
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
