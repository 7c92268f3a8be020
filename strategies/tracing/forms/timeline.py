"""Timeline: every storage of one training step, from the operation that made it to the moment it was freed.

Moments are counted in operations. What was alive before the first operation (weights, buffers, inputs) is not part of
the timeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from strategies.torch_compat.dispatch import FakeTensor, TorchDispatchMode
from strategies.torch_compat.tensors import tree_leaves
from strategies.tracing.cuda.kernels import scratch

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(slots=True)
class Storage:
    """One allocation: the shape and the item size of the tensor it was made for, `made` and `freed` in operations.

    `operation` is what made it; `copies_weight` whether that was the cast of a weight; `gradient` whether it ended as a
    weight's gradient. `freed` is None while it lives.
    """

    shape: tuple[int, ...]
    item_bytes: int
    operation: str
    made: int
    copies_weight: bool = False
    gradient: bool = False
    freed: int | None = None

    def lives_at(self, moment: int) -> bool:
        """Return whether the storage is alive at a moment."""
        return self.made <= moment and (self.freed is None or self.freed > moment)

    def outlives(self, moment: int) -> bool:
        """Return whether it still lives when the next operation begins."""
        return self.made <= moment and (self.freed is None or self.freed > moment + 1)


@dataclass(slots=True)
class Timeline:
    """The storages of a step in the order of their making.

    `marks` are named moments, `inputs` shapes and item sizes of the batch, `outputs` what each block gave the next one,
    `given` what each block was given of what this step made, with whether it has a gradient, `buffers` shapes and item
    sizes of those each block has, `outside` of those that are in no block.
    """

    storages: list[Storage] = field(default_factory=list)
    inputs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)
    given: list[list[tuple[Storage, bool]]] = field(default_factory=list)
    buffers: list[list[tuple[tuple[int, ...], int]]] = field(default_factory=list)
    outside: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    operations: int = 0

    def mark(self, name: str) -> None:
        """Name the present moment; the first time counts."""
        self.marks.setdefault(name, self.operations)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills a timeline while it is active; `existing` were alive before.

    With `on_cuda` it has also what CUDA's kernels allocate and free inside one operation.
    """

    def __init__(
        self, existing: Iterable[torch.Tensor], weights: Iterable[torch.Tensor], *, on_cuda: bool = False
    ) -> None:
        initialize: Any = super().__init__
        initialize()
        self.timeline = Timeline()
        self._on_cuda = on_cuda
        self._known: dict[weakref.ref[torch.UntypedStorage], Storage | None] = {}
        self._weights = {weakref.ref(weight.untyped_storage()): weight.stride() for weight in weights}
        for tensor in existing:
            self._known[self._reference(tensor)] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        self.timeline.operations += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._observe(leaf, func, args)
        if self._on_cuda:
            now = self.timeline.operations
            inside = [Storage(*item, operation=str(func), made=now, freed=now + 1) for item in scratch(func, args)]
            self.timeline.storages += inside
        return result

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that a block is given these tensors."""
        storages = {}
        for tensor in tensors:
            storage = self._known.get(weakref.ref(tensor.untyped_storage()))
            if storage is not None:
                storages[id(storage)] = storage, tensor.requires_grad
        self.timeline.given.append(list(storages.values()))

    def output(self, tensor: torch.Tensor) -> None:
        """Say that a tensor is what a block gives to the next one."""
        storage = self._known[weakref.ref(tensor.untyped_storage())]
        assert storage is not None, "a block gives back an input or a weight"
        self.timeline.outputs.append(storage)

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Say that a storage made in this step is a weight's gradient."""
        storage = self._known.get(weakref.ref(tensor.untyped_storage()))
        if storage is not None:
            storage.gradient = True

    def _reference(self, tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
        return weakref.ref(tensor.untyped_storage(), self._died)

    def _observe(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        if weakref.ref(tensor.untyped_storage()) in self._known:
            return
        cast = func is torch.ops.aten._to_copy.default and self._is_weight(args[0])
        storage = Storage(tuple(tensor.shape), tensor.element_size(), str(func), self.timeline.operations, cast)
        self._known[self._reference(tensor)] = storage
        self.timeline.storages.append(storage)

    def _is_weight(self, tensor: Any) -> bool:
        """Return whether it is a weight as its module holds it; autocast keeps no copy of a transposed one."""
        if not isinstance(tensor, torch.Tensor):
            return False
        return self._weights.get(weakref.ref(tensor.untyped_storage())) == tensor.stride()

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        storage = self._known.pop(reference, None)
        if storage is not None and not storage.gradient:  # whoever follows the step may let go of it
            storage.freed = self.timeline.operations + 1


class Marks:
    """Names the moments at which blocks begin and end, by the order in which they run.

    What a block gives to the next one is the first tensor of its output, or the `last` one where that is the stream.
    """

    def __init__(self, recorder: Recorder, blocks: Sequence[nn.Module], *, last: bool = False) -> None:
        self._recorder, self._timeline, self._last = recorder, recorder.timeline, last
        self.entered = 0
        self.handles: list[RemovableHandle] = []
        for block in blocks:
            self.handles.append(block.register_forward_pre_hook(self.enter, with_kwargs=True))
            self.handles.append(block.register_forward_hook(self.leave))

    def enter(self, _block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Mark that a block begins."""
        self._timeline.mark(f"enter{self.entered}")
        hidden = inputs[0] if inputs else named["hidden_states"]
        self._recorder.given(leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor))
        if self.entered == 0 and hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self._timeline.mark("back_first"))

    def leave(self, block: nn.Module, _inputs: Any, output: Any) -> None:
        """Mark that a block ends."""
        index = self.entered
        self.entered += 1
        self._timeline.mark(f"leave{index}")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        hidden: Any = tensors[-1 if self._last else 0]
        self._timeline.buffers.append([(tuple(buffer.shape), buffer.element_size()) for buffer in block.buffers()])
        self._recorder.output(hidden)
        hidden.register_hook(lambda _gradient: self._timeline.mark(f"back{index}"))
