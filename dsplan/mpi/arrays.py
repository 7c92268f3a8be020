"""Leaves and their numpy arrays, both ways: arrays, numpy scalars, floats, torch tensors.

torch is looked up among the modules that the program has loaded, never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.errors import CannotRun

# Nested dicts, lists and tuples are taken apart into leaves in the same order on all ranks, and put together again.


Tree = Any
Key = str | int
Path = tuple[Key, ...]


def leaves(tree: Tree) -> dict[Path, Any]:
    """Every leaf by its path; a dict's keys in sorted order, because ranks may have filled theirs in different orders.

    Raises:
        CannotRun: a key is neither a text nor a whole number, or two keys of one dict read the same.
    """
    return dict(_walk(tree, ()))


def name_of(path: Path) -> str:
    """Return how a leaf is called in messages and files: `blocks/0/weight`."""
    return "/".join(str(key) for key in path) or "(the value itself)"


def rebuilt(tree: Tree, replace: Callable[[Path], Any], path: Path = ()) -> Tree:
    """Return the same dicts, lists and tuples around other leaves; what is a Mapping becomes a dict."""
    if isinstance(tree, Mapping):
        return {key: rebuilt(value, replace, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        members = [rebuilt(value, replace, (*path, index)) for index, value in enumerate(tree)]
        if isinstance(tree, list):
            return members
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    return replace(path)


def subtree(tree: Tree, path: Path) -> Tree:
    """Return what lies at a path.

    Raises:
        CannotRun: nothing does; the message names the keys there are.
    """
    for depth, key in enumerate(path):
        keys = list(tree) if isinstance(tree, Mapping) else list(range(len(tree))) if _is_sequence(tree) else []
        if key not in keys:
            there = ", ".join(repr(key) for key in keys[:8]) or "nothing"
            raise CannotRun(f"there is no {name_of(path[: depth + 1])!r}; {name_of(path[:depth])} has {there}")
        tree = tree[key]
    return tree


def _is_sequence(tree: Tree) -> bool:
    return isinstance(tree, (list, tuple))


def _walk(tree: Tree, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        for key in _sorted_keys(tree, path):
            yield from _walk(tree[key], (*path, key))
    elif _is_sequence(tree):
        for index, value in enumerate(tree):
            yield from _walk(value, (*path, index))
    else:
        yield path, tree


def _sorted_keys(tree: Mapping[Any, Any], path: Path) -> list[Key]:
    for key in tree:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise CannotRun(f"{name_of(path)}: the key {key!r} is neither a text nor a whole number; rename it")
    ordered = sorted(tree, key=str)
    for first, second in pairwise(ordered):
        if str(first) == str(second):
            raise CannotRun(f"{name_of(path)}: the keys {first!r} and {second!r} read the same; rename one")
    return ordered


Array = npt.NDArray[Any]
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A leaf's looks without its values: enough to make one like it.

    `dtype` is the leaf's own (numpy's or torch's), `word` its name; `device` is None but for tensors.
    """

    kind: str
    word: str
    shape: tuple[int, ...]
    dtype: Any
    device: Any = None

    def __str__(self) -> str:
        return f"{self.word} {list(self.shape)}"

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def transfer_dtype(self) -> np.dtype[Any]:
        """The dtype in which values are sent without reduction: the leaf's own, or fp32 for bfloat16."""
        return np.dtype(np.float32 if self.word == "bfloat16" else self.word)

    @property
    def reduce_dtype(self) -> np.dtype[Any]:
        """The dtype of sums over ranks: fp32 for 16-bit floats, else the leaf's own."""
        return np.dtype(np.float32 if self.word in _HALVES else self.word)

    @property
    def is_floating(self) -> bool:
        """True for floating-point dtypes, bfloat16 too."""
        return self.word == "bfloat16" or np.dtype(self.word).kind == "f"

    @property
    def is_summable(self) -> bool:
        """True if a mean over ranks means something: real or complex floating point."""
        return self.is_floating or np.dtype(self.word).kind == "c"

    def leaf_of(self, values: Array) -> Any:
        """Return a leaf of this form with `values`, [count] or [shape], any dtype that casts to it."""
        values = values.reshape(self.shape)
        if self.kind == "tensor":
            torch = sys.modules["torch"]
            if values.dtype == np.float32 and self.word != "float32":
                return torch.from_numpy(np.ascontiguousarray(values)).to(dtype=self.dtype, device=self.device)
            return torch.from_numpy(np.array(values, dtype=self.word)).to(device=self.device)
        cast = values.astype(self.dtype, copy=False)
        if self.kind == "array":
            return cast
        return cast[()] if self.kind == "scalar" else cast[()].item()

    def rounded(self, values: Array) -> Array:
        """`values`, [elements], as they are after a cast to this form's dtype, in `transfer_dtype`."""
        kind = "tensor" if self.kind == "tensor" else "array"
        flat = replace(self, kind=kind, shape=values.shape, device=None if kind == "array" else "cpu")
        return values_of(flat.leaf_of(values))


def is_tensor(value: object) -> bool:
    """Return whether a leaf is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Return whether a leaf has a shape: numpy's arrays and scalars, and torch's tensors."""
    return isinstance(value, (np.ndarray, np.generic)) or is_tensor(value)


def form_of(value: Any, name: str) -> Form:
    """Return the form of a leaf called `name`.

    Raises:
        CannotRun: it is no array, or one of a kind that cannot be sent.
    """
    if is_tensor(value):
        return _form_of_tensor(value, name)
    if isinstance(value, (np.ndarray, np.generic)):
        word = value.dtype.name
        if word != "bfloat16" and value.dtype.kind not in "biufc":
            raise CannotRun(f"{name!r} is an array of {word}; arrays of numbers can be sent")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return Form(kind=kind, word=word, shape=value.shape, dtype=value.dtype)
    if isinstance(value, (bool, int, float, complex)) and np.asarray(value).dtype.kind != "O":
        dtype = np.asarray(value).dtype
        return Form(kind="number", word=dtype.name, shape=(), dtype=dtype)
    raise CannotRun(f"{name!r} is of type {type(value).__name__}; it must be a numpy array, a torch tensor or a number")


def values_of(value: Any) -> Array:
    """Return a leaf's values in its `Form.transfer_dtype`, without a copy if they lie so in host memory already."""
    if is_tensor(value):
        host = value.detach().cpu()
        array: Array = (host.float() if str(host.dtype) == "torch.bfloat16" else host).numpy()
        return array
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def run_of(value: Any, start: int, stop: int) -> Array:
    """Elements of a flattened leaf, in its `Form.transfer_dtype`; a view where `values_of` would be one."""
    if not isinstance(value, np.ndarray) and not is_tensor(value):
        value = np.asarray(value)
    return values_of(value.reshape(-1)[start:stop])


def own_memory(leaf: Any) -> Array | None:
    """Return a leaf's memory as a writable flat array, [count], or None if it has another dtype or place."""
    if is_tensor(leaf):
        if leaf.device.type != "cpu" or not leaf.is_contiguous() or str(leaf.dtype) == "torch.bfloat16":
            return None
        return values_of(leaf).reshape(-1)
    if not isinstance(leaf, np.ndarray) or not (leaf.flags.writeable and leaf.flags.c_contiguous):
        return None
    return leaf.reshape(-1) if leaf.dtype.isnative and leaf.dtype.name != "bfloat16" else None


def write_into(leaf: Any, values: Array, name: str) -> None:
    """Replace the values of an array or a tensor in place.

    Raises:
        CannotRun: the leaf cannot be written.
    """
    if is_tensor(leaf):
        torch = sys.modules["torch"]
        leaf.detach().copy_(torch.from_numpy(np.ascontiguousarray(values)).view(leaf.shape))
    elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
        leaf[...] = values.reshape(leaf.shape)
    else:
        raise CannotRun(f"{name!r} cannot be written in place; leave in_place out and take what is returned")


def _form_of_tensor(value: Any, name: str) -> Form:
    word = str(value.dtype).removeprefix("torch.")
    is_numpy_dtype = word == "bfloat16" or word in np.sctypeDict
    if value.layout != sys.modules["torch"].strided or not is_numpy_dtype:
        raise CannotRun(f"{name!r} is a {value.layout} tensor of {value.dtype}; make it dense, of a dtype numpy has")
    return Form(kind="tensor", word=word, shape=tuple(value.shape), dtype=value.dtype, device=value.device)
