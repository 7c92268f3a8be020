"""Live bytes of a traced step by category, with the peak of each phase.

Every storage that an operation returns is alive until Python's weak reference to it dies; its size is rounded up to 512
bytes as CUDA's allocator does. What kernels allocate and free inside is added by `strategies.tracing.cuda.kernels`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import torch

from planner.cost.memory.allocator import Event, Free, Request
from strategies.torch_compat.dispatch import FakeTensor, FakeTensorMode, TorchDispatchMode, schema_of, without_python
from strategies.torch_compat.distributed import functional_collectives
from strategies.torch_compat.tensors import storage_number
from strategies.tracing.storage_tracker import plain_parts, resizes_reported

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
        """Return what `func(*args, **kwargs)` returns."""
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
        results = self._seen[key]
        return func(*args, **kwargs) if results is None else self._again(*results)

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
        """Return what recomputes the result, or None if it shares a storage or is only part of one."""
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [item for item in results if item is not None]
        if not all(self._is_mine(tensor) and _is_whole(tensor) for tensor in tensors):
            return None
        storages = [storage_number(tensor) for tensor in tensors]
        if len(set(storages)) < len(storages) or not set(storages).isdisjoint(_storages(args)):
            return None
        described = tuple(None if item is None else _describe(item) for item in results)
        return type(result), described

    def _again(self, kind: type, described: tuple[_Made | None, ...]) -> Any:
        with without_python():
            results = [None if item is None else self._tensor(item) for item in described]
        if kind is list:
            return results
        return tuple(results) if kind is tuple else results[0]

    def _tensor(self, described: _Made) -> torch.Tensor:
        shape, stride, dtype, device = described
        return FakeTensor(self._mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def _describe(tensor: FakeTensor) -> _Made:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device


def _kind(func: Any) -> _Kind:
    if func.namespace != "aten" or func in _EXCEPTIONS or torch.Tag.dynamic_output_shape in func.tags:
        return "other"
    schema = schema_of(func)
    if schema.name.startswith("aten::_foreach_") and schema.name.endswith("_"):
        return "changes lists"
    values = [*schema.arguments, *schema.returns]
    tensors = all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns)
    makes = tensors and bool(schema.returns) and not any(value.alias_info for value in values)
    return "makes" if makes else "other"


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether an empty tensor of this shape and stride would have a storage of the same size."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = reach if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == elements * tensor.element_size()


def _storages(values: Any) -> set[int]:
    if isinstance(values, torch.Tensor):
        return {storage_number(values)}
    if isinstance(values, (list, tuple)):
        return {number for value in values for number in _storages(value)}
    return set()


Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "temporaries", "host"]
CATEGORIES: tuple[Category, ...] = (
    *("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries"),
    "host",
)
"""`host` is not on the device and not part of any sum."""
_ROUNDING = 512
_FAKE = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_DEVICE = torch.ops.prim.device.default
_TO_COPY = torch.ops.aten._to_copy.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_WAIT = functional_collectives().wait_tensor.default
Scratch = Callable[[Any, tuple[Any, ...]], Sequence[int]]


class Storages:
    """Counts the storages of the fake tensors of `mode` while it is active.

    DTensor has fake tensors of its own, with which it works out shapes; they do not count.

    `category` is that of storages made from now on. `scratch` gives the bytes of each tensor that an operation makes
    and frees inside. `events` is what all of this asks of the device's allocator, in its order.
    """

    def __init__(self, mode: FakeTensorMode, scratch: Scratch | None = None) -> None:
        self.category: Category = "activations"
        self._answers_items = False
        self.operation = ""
        self._mode, self._scratch, self._replay = mode, scratch, Replay(mode)
        self._live = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._peak_total = -1
        self._peak: dict[Category, int] = {}
        self._known: dict[weakref.ref[torch.UntypedStorage], tuple[int, Category, int]] = {}
        self.events: list[Event] = []
        self._numbers = count()
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        self._weights: set[weakref.ref[torch.UntypedStorage]] = set()
        self._active = contextlib.ExitStack()

    def __enter__(self) -> Storages:
        self._active.enter_context(resizes_reported(self._resized))
        self._active.enter_context(_Operations(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._active.close()

    @property
    def live(self) -> Mapping[Category, int]:
        """Bytes alive now, by category."""
        return dict(self._live)

    def take_peak(self) -> dict[Category, int]:
        """Bytes by category at the largest moment since the last call; the next search starts now."""
        peak = self._peak if self._peak_total >= self._total else dict(self._live)
        self._peak_total, self._peak = self._total, dict(self._live)
        return peak

    def label(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """Count these tensors under another category from now on, or for the first time; the host's remain there."""
        for tensor in tensors:
            for part in plain_parts(tensor) if tensor is not None else ():
                storage = part.untyped_storage()
                reference = weakref.ref(storage, self._died)
                if reference not in self._known or self._known[reference][1] != "host":
                    self._set(reference, storage.nbytes(), category)

    def name_of(self, tensor: torch.Tensor) -> int:
        """Return the name that events have for the storage of a tensor that counts."""
        return self._known[weakref.ref(tensor.untyped_storage(), self._died)][2]

    def take_casts_as_temporary(self, weights: Iterable[torch.Tensor]) -> None:
        """Take copies of these weights in another dtype, which autocast makes, for temporaries."""
        self._weights = {weakref.ref(part.untyped_storage()) for weight in weights for part in plain_parts(weight)}

    @contextlib.contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """Storages made inside are of this category."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    @contextlib.contextmanager
    def answering_items(self) -> Iterator[None]:
        """Let code read a number from a tensor, as optimizers do their step count: it reads one."""
        before, self._answers_items = self._answers_items, True
        try:
            yield
        finally:
            self._answers_items = before

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, with its inputs and results counted."""
        if func is _ITEM and self._answers_items:
            return 1
        if func is _WAIT:
            return args[0]  # its fake form makes a second tensor
        self.operation = str(func)
        for value in args:
            self._see(value)
        result = self._replay.run(func, args, kwargs)
        category = self.category
        if func is _TO_COPY and weakref.ref(args[0].untyped_storage()) in self._weights:
            category = "temporaries"
        self._see(result, category)
        self._count_inside(func, args)
        self.operation = ""
        return result

    def _count_inside(self, func: Any, args: tuple[Any, ...]) -> None:
        sizes = self._scratch(func, args) if self._scratch is not None else ()
        beside = sum(sizes)
        if sizes:
            names = [next(self._numbers) for _ in sizes]
            self.events += [self._request(name, size) for name, size in zip(names, sizes, strict=True)]
            self.events += map(Free, names)
        if self._total + beside > self._peak_total:
            self._peak_total = self._total + beside
            self._peak = {**self._live, "temporaries": self._live["temporaries"] + beside}

    def _see(self, value: Any, category: Category | None = None) -> None:
        if isinstance(value, torch.Tensor):
            for part in plain_parts(value):
                if not isinstance(part, FakeTensor) or part.fake_mode is not self._mode:
                    continue
                reference = weakref.ref(part.untyped_storage(), self._died)
                if reference not in self._known:
                    self._set(reference, part.untyped_storage().nbytes(), category or self.category)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._see(item, category)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._died)
        _, category, _ = self._known.get(reference, (0, self.category, 0))
        self._set(reference, storage.nbytes(), category)

    def _set(self, reference: weakref.ref[torch.UntypedStorage], nbytes: int, category: Category) -> None:
        size = -(-nbytes // _ROUNDING) * _ROUNDING
        old_size, old_category, name = self._known.pop(reference, (0, category, -1))
        on_device, was_on_device = size and category != "host", old_size and old_category != "host"
        if was_on_device and (size != old_size or not on_device):
            self.events.append(Free(name))
        if on_device and (size != old_size or not was_on_device):
            name = next(self._numbers)
            self.events.append(self._request(name, nbytes))
        self._known[reference] = size, category, name
        self._add(-old_size, old_category)
        self._add(size, category)

    def _request(self, name: int, nbytes: int) -> Request:
        stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        return Request(name, nbytes, stream)

    def _add(self, size: int, category: Category) -> None:
        self._live[category] += size
        if category == "host":
            return
        self._total += size
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, dict(self._live)

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        size, category, name = self._known.pop(reference, (0, "host", -1))
        if size and category != "host":
            self.events.append(Free(name))
        self._add(-size, category)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's wrapper costs as much as the operation

    def __init__(self, storages: Storages) -> None:
        initialize: Any = super().__init__
        initialize()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if not _FAKE.issuperset(types):
            # A tensor subclass such as DTensor: its own dispatch runs plain operations, which come back here.
            return NotImplemented
        return self._storages.run(func, args, kwargs or {})
