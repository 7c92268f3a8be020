"""The true peak of live tensor bytes where no allocator keeps statistics: on CPUs, and of fake tensors in a trace.

A dispatch mode sees every operation. A storage that an operation returns is alive from then until Python's weak
reference to it dies. A storage that was never seen before was alive all along if the first operation on it writes into
it (optimizer states, DDP's buckets, which live in C++ and are found when gradients are copied into them); if it is read
first, some code outside the mode has just made it (the flat inputs of collectives), or it is a weight, which is read
long before the peak. Scratch memory inside a kernel is not seen. Memory that torch's allocator did not give out (a file
that is mapped, whose pages the kernel takes back) counts from the start where an operation writes into it, as into
optimizer states that `torch.load` has read, and not at all where it is only read. Sizes are rounded up to 512 bytes as
CUDA's allocator does, so that figures compare.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from strategies.torch_compat.dispatch import FakeTensor, TorchDispatchMode, schema_of
from strategies.torch_compat.tensors import tree_leaves

_ROUNDING = 512
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FAKE = (*_PLAIN, FakeTensor)


class StorageTracker:
    """Counts live bytes between `__enter__` and `__exit__`; `existing` are tensors alive at the start.

    With `fake`, fake tensors are counted as the tensors they stand for; without, storages on the meta device are not.

    `peak_bytes` is the largest sum of live storages, `live_bytes` the present one, both in bytes.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = (), *, fake: bool = False) -> None:
        self._fake = fake
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._active = contextlib.ExitStack()
        self.meet(existing)

    def meet(self, existing: Iterable[torch.Tensor]) -> None:
        """Count tensors that were alive all along."""
        for tensor in existing:
            self._observe(tensor, was_alive=True)

    def __enter__(self) -> StorageTracker:
        self._active.enter_context(resizes_reported(self._measure))
        self._active.enter_context(_Operations(self._observe, _FAKE if self._fake else _PLAIN, self._runs))
        return self

    _runs: Callable[[Any], object] | None = None
    """Called with every operation before its results are observed, where a subclass has it."""

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def __exit__(self, *exception: object) -> None:
        self._active.close()
        self._sizes.clear()

    def _observe(self, tensor: torch.Tensor, *, was_alive: bool, is_written: bool = False) -> None:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            if self._fake or (storage.device.type != "meta" and (is_written or storage.resizable())):
                new = weakref.ref(storage) not in self._sizes
                # What existed at every moment so far was alive at the peak so far as well.
                self._measure(storage, raises_past_peak=new and was_alive)

    def _measure(self, storage: torch.UntypedStorage, *, raises_past_peak: bool = False) -> None:
        """Take the storage's present size into the account."""
        reference = weakref.ref(storage, self._died)
        size = -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        added = size - self._sizes.pop(reference, 0)
        self._sizes[reference] = size
        self.live_bytes += added
        self.peak_bytes = max(self.peak_bytes + added * raises_past_peak, self.live_bytes)

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.live_bytes -= self._sizes.pop(reference, 0)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows an observer every tensor that an operation reads and, afterwards, those it returns."""

    def __init__(self, observe: Any, plain: tuple[type, ...], runs: Callable[[Any], object] | None) -> None:
        initialize: Any = super().__init__
        initialize()
        self._observe, self._runs = observe, runs
        self._plain = plain

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types and FakeTensor not in self._plain:
            # DTensor works out shapes on fake tensors of its own beside real ones.
            return func(*args, **(kwargs or {}))
        if any(kind not in self._plain for kind in types):
            # A tensor subclass such as DTensor: its own dispatch runs plain operations, which come back here.
            return NotImplemented
        written = {id(leaf) for leaf in _written(func, args, kwargs or {})}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._observe(leaf, was_alive=id(leaf) in written, is_written=id(leaf) in written)
        result = func(*args, **(kwargs or {}))
        if self._runs is not None:
            self._runs(func)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._observe(leaf, was_alive=False)
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operation changes in place or writes its result to."""
    arguments = schema_of(func).arguments
    outputs = [argument for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    if not outputs:
        return []
    positions = {argument.name: index for index, argument in enumerate(arguments)}
    values = [
        kwargs[output.name] if output.name in kwargs else args[positions[output.name]]
        for output in outputs
        if output.name in kwargs or positions[output.name] < len(args)
    ]
    return tree_leaves(values)


@contextlib.contextmanager
def resizes_reported(measure: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """FSDP2 frees and restores gathered parameters by resizing their storage, which is not an operation."""
    kind: Any = torch.UntypedStorage
    original = kind.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(storage, size)
        measure(storage)
        return storage

    kind.resize_ = resize
    try:
        yield
    finally:
        kind.resize_ = original


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors a tensor is made of: a DTensor's local shard, a wrapper subclass's parts, or itself."""
    if isinstance(tensor, FakeTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in plain_parts(part)]
