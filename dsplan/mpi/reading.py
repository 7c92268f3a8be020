"""One published checkpoint, read by a rank of any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsplan.mpi import files
from dsplan.mpi.arrays import Array, Tree, form_of, is_array, leaves, name_of, rebuilt
from dsplan.mpi.files import Part, Region
from dsplan.mpi.layout import Json
from strategies.checkpoint.reading import Stored, counts, is_count, json_object, read_bytes, shown, why_no_cover
from strategies.errors import BrokenFile, CannotRun

INDEX = "index.json"
VERSION = 1
_DEEPEST = 600
"""Each level of a tree is three of the index."""


class SavedTree:
    """Tree of `rank` of `ranks`: its own where as many ranks saved it, else everyone's joined.

    Raises:
        BrokenFile: the folder's index cannot be read.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder = folder
        index = _read_index(folder / INDEX)
        self._arrays: Json = index["arrays"]
        self._headers: dict[str, dict[str, Stored]] = {}
        own = [index["structure_of_rank"][rank]] if ranks == index["world_size"] else range(len(index["structures"]))
        self._rank = rank if ranks == index["world_size"] else None
        self._saved_by, self._ranks = index["world_size"], ranks
        self._trees: list[Tree] = [_tree_of(index["structures"][number]) for number in own]
        self._named = [{name_of(path): value for path, value in leaves(tree).items()} for tree in self._trees]

    def whole(self) -> Tree:
        """Return the tree with every array whole.

        Raises:
            BrokenFile: a file is damaged.
            CannotRun: ranks held different values under one name, and other ranks than those load them.
        """
        joined = _joined(self._trees, ())
        return rebuilt(joined, lambda path: self._values(name_of(path)))

    def like(self, wanted: Tree) -> Tree:
        """Return the leaves that `wanted` has, in its nesting.

        An array as the same kind and dtype, a Part as that part.

        Raises:
            As `whole`; CannotRun also where there is no such leaf, or one of another shape.
        """
        by_path = {path: self._like(name_of(path), value) for path, value in leaves(wanted).items()}
        return rebuilt(wanted, by_path.__getitem__)

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
            return form_of(wanted, name).leaf_of(self._assembled(saved, None))
        part = wanted.region.within(self._assembled(saved, wanted.region)).astype(wanted.values.dtype)
        return Part(values=part, shape=wanted.shape, start=wanted.start)

    def _values(self, name: str) -> Any:
        saved = self._leaf(name)
        if not isinstance(saved, _Array):
            return saved
        whole = self._assembled(self._array(name), None)
        return whole[()] if saved.kind == "scalar" else whole

    def _leaf(self, name: str) -> Any:
        """Return what was saved under a name; the same on all ranks that count."""
        versions = [named[name] for named in self._named if name in named]
        if not versions:
            raise CannotRun(f"load_checkpoint: {self._folder} has no {name!r}")
        if any(not _same(value, versions[0]) for value in versions):
            raise self._ambiguous(name)
        return versions[0]

    def _array(self, name: str) -> Json:
        """Return the index's entry of an array, or None if the leaf is no array."""
        if not isinstance(self._leaf(name), _Array):
            return None
        variants = self._arrays[name]
        own = (
            [variant for variant in variants if self._rank in variant["ranks"]] if self._rank is not None else variants
        )
        if len(own) != 1:
            raise self._ambiguous(name)
        return own[0]

    def _ambiguous(self, name: str) -> CannotRun:
        return CannotRun(
            f"load_checkpoint: the {self._saved_by} ranks that saved {self._folder} had different values of {name!r},"
            f" and there are {self._ranks} ranks now; leave it out with like=, or save it as a dsplan.mpi.Part"
        )

    def _assembled(self, saved: Json, wanted: Region | None) -> Array:
        """Return the whole array; where only a region is wanted, elements outside of it may be left unset."""
        word, shape = saved["dtype"], tuple(saved["shape"])
        regions = [(piece, _region(piece, shape)) for piece in saved["pieces"]]
        needed = [
            (piece, region, self._locate(piece, word, region))
            for piece, region in regions
            if wanted is None or wanted.overlaps(region)
        ]
        whole = np.empty(shape, dtype=np.float32 if word == "bfloat16" else word)
        for piece, region, span in needed:
            values = files.read(self._folder / piece["file"], piece["key"], span, word, piece["digest"])
            region.copy_to(whole, values.reshape(region.shape))
        return whole

    def _locate(self, piece: Json, word: str, region: Region) -> Stored:
        """Return where a piece lies in its file, which holds as many bytes of it as it should."""
        name, key = piece["file"], piece["key"]
        if name not in self._headers:
            self._headers[name] = files.header(self._folder, name)
        span = self._headers[name].get(key)
        if span is None or span.end - span.begin != files.bytes_for(word, region.shape):
            raise BrokenFile(self._folder / name, f"does not hold all of {shown(key)}", "load another step")
        return span


class _Array:
    """Stands in a tree where an array is."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Array)

    __hash__ = None  # type: ignore[assignment]


def _read_index(path: Path) -> Mapping[str, Json]:
    index = json_object(path, read_bytes(path.parent, path.name), _DEEPEST)
    version = index.get("version")
    if version != VERSION:
        problem = f"is of version {shown(version)}, and this dsplan reads {VERSION}"
        raise BrokenFile(path, problem, "load it with the other one")
    problem = _trees_problem(index) or next(filter(None, map(_variants_problem, *_arrays_of(index))), "")
    if problem:
        raise BrokenFile(path, problem, "load another step")
    return index


def _arrays_of(index: Mapping[str, Json]) -> tuple[list[str], list[Json]]:
    arrays = index.get("arrays")
    return (list(arrays), list(arrays.values())) if isinstance(arrays, dict) else (["arrays"], [None])


def _trees_problem(index: Mapping[str, Json]) -> str:
    """Return what is wrong with the nestings of the ranks' trees; empty where nothing is."""
    structures, of_ranks, ranks = (index.get(key) for key in ("structures", "structure_of_rank", "world_size"))
    if not isinstance(structures, list) or not isinstance(of_ranks, list) or ranks != len(of_ranks) or not of_ranks:
        return "does not say what each rank held"
    if not all(is_count(rank) and rank < len(structures) for rank in of_ranks):
        return "names a tree that it has not"
    there = index.get("arrays")
    for structure in structures:
        names = _array_names(structure)
        if names is None:
            return "holds a tree of unknown kinds"
        missing = [name for name in names if not isinstance(there, dict) or name not in there]
        if missing:
            return f"does not say where {shown(missing[0])} lies"
    return ""


def _array_names(structure: Json) -> list[str] | None:
    """Return the names of a tree's arrays, or None if it is no tree."""
    names: list[str] = []
    rest: list[tuple[tuple[str | int, ...], Json]] = [((), structure)]
    while rest:
        path, node = rest.pop()
        if not isinstance(node, dict) or len(node) != 1:
            return None
        ((kind, content),) = node.items()
        if kind == "array" and content in ("array", "scalar"):
            names.append(name_of(path))
        elif kind in ("list", "tuple") and isinstance(content, list):
            rest += [((*path, index), member) for index, member in enumerate(content)]
        elif kind == "dict" and isinstance(content, list) and all(map(_is_member, content)):
            rest += [((*path, key), member) for key, member in content]
        elif kind != "value" or isinstance(content, (dict, list)):
            return None
    return names


def _is_member(entry: Json) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[0]) in (str, int)


def _variants_problem(name: str, variants: Json) -> str:
    """Return what is wrong with the arrays of a name; empty where each element of each is in one piece."""
    if not isinstance(variants, list):
        return f"does not say where {shown(name)} lies"
    for variant in variants:
        saved = variant if isinstance(variant, dict) else {}
        shape, ranks, pieces = counts(saved.get("shape")), saved.get("ranks"), saved.get("pieces")
        is_storable = isinstance(saved.get("dtype"), str) and files.can_hold(saved["dtype"])
        if not is_storable or shape is None or not isinstance(ranks, list) or not isinstance(pieces, list):
            return f"does not say what {shown(name)} is"
        problem = _pieces_problem(shape, pieces)
        if problem:
            return f"{shown(name)}: {problem}"
    return ""


def _pieces_problem(shape: tuple[int, ...], pieces: list[Json]) -> str | None:
    boxes, are_runs = [], set[bool]()
    for piece in pieces:
        if not isinstance(piece, dict) or not all(isinstance(piece.get(key), str) for key in ("file", "key", "digest")):
            return "a piece has no file, key and digest"
        start, size = piece.get("start", [0] * len(shape)), counts(piece.get("shape", list(shape)))
        begin = (start,) if is_count(start) else counts(start)
        if begin is None or size is None:
            return "a piece lies nowhere"
        are_runs.add(is_count(start))
        boxes.append((begin, size))
    if len(are_runs) > 1:
        return "some of its pieces are boxes and some are runs"
    return why_no_cover((math.prod(shape),) if are_runs == {True} else shape, boxes)


def _tree_of(structure: Json) -> Tree:
    ((kind, content),) = structure.items()
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
