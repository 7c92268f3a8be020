"""One published checkpoint, read by a rank of any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strategies.errors import BrokenFile, CannotRun
from strategies.mpi import files
from strategies.mpi.arrays import Array, form_of, is_array
from strategies.mpi.layout import Json
from strategies.mpi.parts import Part, Region
from strategies.mpi.tree import Tree, leaves, name_of, rebuilt

INDEX = "index.json"
VERSION = 1


class SavedTree:
    """What `rank` of `ranks` gets of a checkpoint: its own tree where as many ranks saved it, else everyone's joined.

    Raises:
        BrokenFile: the folder's index cannot be read.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder = folder
        index = _read_index(folder / INDEX)
        self._arrays: Json = index["arrays"]
        own = [index["structure_of_rank"][rank]] if ranks == index["world_size"] else range(len(index["structures"]))
        self._rank = rank if ranks == index["world_size"] else None
        self._saved_by, self._ranks = index["world_size"], ranks
        self._trees: list[Tree] = [_tree_of(index["structures"][number]) for number in own]
        self._named = [{name_of(path): value for path, value in leaves(tree).items()} for tree in self._trees]

    def whole(self) -> Tree:
        """The tree with every array whole.

        Raises:
            BrokenFile: a file is damaged.
            CannotRun: ranks held different values under one name, and other ranks than those load them.
        """
        joined = _joined(self._trees, ())
        return rebuilt(joined, lambda path: self._values(name_of(path)))

    def like(self, wanted: Tree) -> Tree:
        """The leaves that `wanted` has, in its nesting: an array as the same kind and dtype, a Part as that part.

        Raises:
            As `whole`; CannotRun also where there is no such leaf, or one of another shape.
        """
        made = {path: self._like(name_of(path), value) for path, value in leaves(wanted).items()}
        return rebuilt(wanted, made.__getitem__)

    def _like(self, name: str, wanted: Any) -> Any:
        if not isinstance(wanted, Part) and not is_array(wanted):
            return self._values(name)
        saved = self._array(name)
        shape = tuple(saved["shape"]) if saved else None
        if shape != tuple(wanted.shape):
            there = "no array" if saved is None else f"of shape {list(saved['shape'])}"
            raise CannotRun(
                f"load_checkpoint: {name!r} has shape {list(wanted.shape)}, in {self._folder} it is {there}"
            )
        if not isinstance(wanted, Part):
            return form_of(wanted, name).made(self._assembled(saved, None))
        part = wanted.region.within(self._assembled(saved, wanted.region)).astype(wanted.values.dtype)
        return Part(values=part, shape=wanted.shape, start=wanted.start)

    def _values(self, name: str) -> Any:
        found = self._leaf(name)
        if not isinstance(found, _Array):
            return found
        whole = self._assembled(self._array(name), None)
        return whole[()] if found.kind == "scalar" else whole

    def _leaf(self, name: str) -> Any:
        """What was saved under a name; the same on all ranks that count."""
        found = [named[name] for named in self._named if name in named]
        if not found:
            raise CannotRun(f"load_checkpoint: {self._folder} has no {name!r}")
        if any(not _same(one, found[0]) for one in found):
            raise self._ambiguous(name)
        return found[0]

    def _array(self, name: str) -> Json:
        """The index's entry of an array; None where the leaf is no array."""
        if not isinstance(self._leaf(name), _Array):
            return None
        variants = self._arrays[name]
        own = [one for one in variants if self._rank in one["ranks"]] if self._rank is not None else variants
        if len(own) != 1:
            raise self._ambiguous(name)
        return own[0]

    def _ambiguous(self, name: str) -> CannotRun:
        return CannotRun(
            f"load_checkpoint: the {self._saved_by} ranks that saved {self._folder} had different values of {name!r},"
            f" and there are {self._ranks} ranks now; leave it out with like=, or save it as a dsplan.mpi.Part"
        )

    def _assembled(self, saved: Json, wanted: Region | None) -> Array:
        """The whole array; where only a region is wanted, elements outside of it may be left unset."""
        word, shape = saved["dtype"], tuple(saved["shape"])
        whole = np.empty(shape, dtype=np.float32 if word == "bfloat16" else word)
        for piece in saved["pieces"]:
            region = _region(piece, shape)
            if wanted is None or wanted.overlaps(region):
                values = files.read(self._folder / piece["file"], piece["key"], word, piece["digest"])
                region.copy_to(whole, values.reshape(region.shape))
        return whole


class _Array:
    """Stands in a tree where an array is."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Array)

    __hash__ = None  # type: ignore[assignment]


def _read_index(path: Path) -> Mapping[str, Json]:
    try:
        index: Mapping[str, Json] = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BrokenFile(path, f"cannot be read ({problem})", "load another step") from None
    if version != VERSION:
        raise BrokenFile(
            path, f"is of version {version}, and this dsplan reads {VERSION}", "load it with the other one"
        )
    return index


def _tree_of(structure: Json) -> Tree:
    kind, content = next(iter(structure.items()))
    if kind == "dict":
        return {key: _tree_of(value) for key, value in content}
    if kind in ("list", "tuple"):
        members = [_tree_of(value) for value in content]
        return members if kind == "list" else tuple(members)
    return _Array(content) if kind == "array" else content


def _same(one: Any, two: Any) -> bool:
    return bool(one == two) or (one != one and two != two)


def _joined(trees: Sequence[Tree], path: tuple[str | int, ...]) -> Tree:
    """One nesting that has the keys of all; leaves are looked up afterwards."""
    first = trees[0]
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _joined([tree[key] for tree in trees if key in tree], (*path, key)) for key in keys}
    if all(type(tree) is type(first) and isinstance(tree, (list, tuple)) for tree in trees):
        if len({len(tree) for tree in trees}) > 1:
            raise CannotRun(f"load_checkpoint: {name_of(path)!r} was of other lengths on other ranks; use like=")
        return type(first)(_joined(members, (*path, index)) for index, members in enumerate(zip(*trees, strict=True)))
    if any(isinstance(tree, (dict, list, tuple)) for tree in trees):
        raise CannotRun(f"load_checkpoint: {name_of(path)!r} was of other kinds on other ranks; use like=")
    return first


def _region(piece: Json, shape: tuple[int, ...]) -> Region:
    if "start" not in piece:
        return Region(start=(0,) * len(shape), shape=shape)
    start = piece["start"]
    return Region(start=start if isinstance(start, int) else tuple(start), shape=tuple(piece["shape"]))
