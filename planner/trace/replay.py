"""Results of operations seen before, made again without asking torch's fake kernels, which is most of a trace's time.

Only operations that make tensors of their own are replayed: the shapes of arguments then say all about the results.
Operations in place that change no shape are not run at all.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
# Their schemas do not say that they return a view, or the result holds a number that code may read.
_EXCEPTIONS = frozenset({_aten._unsafe_view.default, _aten.lift_fresh_copy.default})
_IN_PLACE = frozenset(
    {_aten.copy_.default, _aten.add_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor, _aten.zero_.default}
)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_Kind = Literal["makes", "changes lists", "other"]
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class _NoKeyError(Exception):
    """Something in the arguments has no short description."""


class Replay:
    """Runs operations on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kinds: dict[Any, _Kind] = {}
        self._seen: dict[Any, tuple[type, tuple[_Made | None, ...]] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns."""
        if func in _IN_PLACE and self._is_mine(args[0]):
            return args[0]
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind == "changes lists" and all(self._is_mine(value) for value in args[0]):
            return None
        if kind != "makes":
            return func(*args, **kwargs)
        try:
            key = (func, self._key(args), self._key(tuple(kwargs.items())))
        except _NoKeyError:
            return func(*args, **kwargs)
        if key not in self._seen:
            result = func(*args, **kwargs)
            self._seen[key] = self._description(result, args)
            return result
        known = self._seen[key]
        return func(*args, **kwargs) if known is None else self._again(*known)

    def _is_mine(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.fake_mode is self._mode

    def _key(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if value.fake_mode is not self._mode:
                raise _NoKeyError
            return value.shape, value.stride(), value.dtype
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (list, tuple)):
            return tuple(self._key(item) for item in value)
        raise _NoKeyError

    def _description(self, result: Any, args: tuple[Any, ...]) -> tuple[type, tuple[_Made | None, ...]] | None:
        """What it takes to make the result again; None where it shares a storage or is only part of one."""
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [item for item in results if item is not None]
        if not all(self._is_mine(tensor) and _is_whole(tensor) for tensor in tensors):
            return None
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        if len(set(storages)) < len(storages) or not set(storages).isdisjoint(_storages(args)):
            return None
        made = tuple(None if item is None else _made(item) for item in results)
        return type(result), made

    def _again(self, kind: type, made: tuple[_Made | None, ...]) -> Any:
        with torch._C._DisableTorchDispatch():
            results = [None if item is None else self._tensor(item) for item in made]
        if kind is list:
            return results
        return tuple(results) if kind is tuple else results[0]

    def _tensor(self, made: _Made) -> torch.Tensor:
        shape, stride, dtype, device = made
        return FakeTensor(self._mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def _made(tensor: FakeTensor) -> _Made:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device


def _kind(func: Any) -> _Kind:
    if func.namespace != "aten" or func in _EXCEPTIONS or torch.Tag.dynamic_output_shape in func.tags:
        return "other"
    schema = func._schema
    if schema.name.startswith("aten::_foreach_") and schema.name.endswith("_"):
        return "changes lists"
    places = [*schema.arguments, *schema.returns]
    tensors = all(str(place.type) in ("Tensor", "List[Tensor]") for place in schema.returns)
    makes = tensors and bool(schema.returns) and not any(place.alias_info for place in places)
    return "makes" if makes else "other"


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether an empty tensor of this shape and stride would have a storage of the same size."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = reach if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == elements * tensor.element_size()


def _storages(values: Any) -> set[int]:
    if isinstance(values, torch.Tensor):
        return {values.untyped_storage()._cdata}
    if isinstance(values, (list, tuple)):
        return {number for value in values for number in _storages(value)}
    return set()
