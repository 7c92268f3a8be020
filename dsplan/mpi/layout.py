"""The layout of a checkpoint: values that are the same on several ranks are written once, others by every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from dsplan.mpi.arrays import Tree, form_of, is_array, leaves, name_of, values_of
from dsplan.mpi.files import Part, Region, bytes_of, can_hold, digest_of
from strategies.errors import CannotRun

Json = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayDescription:
    """A named array of one rank, without its values: a whole array (`region` None) or a part of one of `shape`."""

    word: str
    shape: tuple[int, ...]
    region: Region | None
    digest: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeDescription:
    """A rank's tree without its values: its nesting as JSON, and its arrays by name."""

    structure: Json
    arrays: Mapping[str, ArrayDescription]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The `arrays` section of the index, and for each rank what it writes: key in the file -> name in its tree."""

    arrays: Json
    writes: Sequence[Mapping[str, str]]


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def describe(state: Tree) -> TreeDescription:
    """Describe a tree and its arrays.

    Raises:
        CannotRun: a leaf can be stored neither as an array nor as JSON.
    """
    arrays = {}
    for path, value in leaves(state).items():
        if isinstance(value, Part) or is_array(value):
            arrays[name_of(path)] = _described_array(value, name_of(path))
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            raise CannotRun(
                f"save_checkpoint: {name_of(path)!r} is of type {type(value).__name__}; a checkpoint holds arrays,"
                " Parts, numbers, texts and None, in dicts, lists and tuples"
            )
    return TreeDescription(structure=structure_of(state), arrays=arrays)


def structure_of(tree: Tree) -> Json:
    """Return a tree's nesting around `{"array": kind}` and `{"value": …}`.

    Nestings are `{"dict": [[key, …], …]}`, `{"list": […]}` and `{"tuple": […]}`.
    """
    if isinstance(tree, Mapping):
        return {"dict": [[key, structure_of(value)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list" if isinstance(tree, list) else "tuple": [structure_of(value) for value in tree]}
    if isinstance(tree, Part) or is_array(tree):
        return {"array": "scalar" if isinstance(tree, np.generic) else "array"}
    return {"value": tree}


def lay_out(ranks: Sequence[Mapping[str, ArrayDescription]]) -> Layout:
    """Assign arrays to the ranks that write them; of ranks with the same values, the one that writes least so far.

    Raises:
        CannotRun: the parts of an array do not make it up.
    """
    busy = [0] * len(ranks)
    writes: list[dict[str, str]] = [{} for _ in ranks]
    arrays: dict[str, Json] = {}
    for name in dict.fromkeys(name for described in ranks for name in described):
        holders = {rank: described[name] for rank, described in enumerate(ranks) if name in described}
        arrays[name] = []
        for variant in _variants(name, holders):
            pieces: list[Json] = []
            for same in variant:
                writer = min(same, key=lambda rank: (busy[rank], rank))
                key = name if len(variant) == 1 else f"{name}.{len(pieces)}"
                key = f"{key}@{writer}" if len(same) < len(holders) and len(variant) == 1 else key
                while key in writes[writer]:
                    key += "'"
                writes[writer][key] = name
                busy[writer] += holders[writer].bytes
                pieces.append(_piece(file_of(writer), key, holders[writer]))
            whole = holders[variant[0][0]]
            members = sorted(rank for same in variant for rank in same)
            arrays[name].append({"dtype": whole.word, "shape": list(whole.shape), "ranks": members, "pieces": pieces})
    return Layout(arrays=arrays, writes=writes)


def _described_array(value: Any, name: str) -> ArrayDescription:
    part = value if isinstance(value, Part) else None
    values = value.values if isinstance(value, Part) else value
    form = form_of(values, name)
    if not can_hold(form.word):
        raise CannotRun(f"save_checkpoint: {name!r} is of {form.word}, which safetensors cannot hold; convert it")
    data = bytes_of(values_of(values), form.word)
    return ArrayDescription(
        word=form.word,
        shape=form.shape if part is None else part.shape,
        region=None if part is None else part.region,
        digest=digest_of(data),
        bytes=data.nbytes,
    )


def _variants(name: str, holders: Mapping[int, ArrayDescription]) -> list[list[list[int]]]:
    """Return the different arrays of a name; each as its pieces; each of these as the ranks that hold it."""
    parts = [array for array in holders.values() if array.region is not None]
    if not parts:
        kinds: dict[Any, list[int]] = {}
        for rank, array in holders.items():
            kinds.setdefault((array.word, array.shape, array.digest), []).append(rank)
        return [[ranks] for ranks in kinds.values()]
    if len(parts) < len(holders) or len({(array.word, array.shape) for array in parts}) > 1:
        raise CannotRun(f"save_checkpoint: {name!r} is a part of one array on some ranks and something else on others")
    regions: dict[Region, list[int]] = {}
    for rank, array in holders.items():
        if array.region is not None:
            regions.setdefault(array.region, []).append(rank)
    for ranks in regions.values():
        other = next((rank for rank in ranks if holders[rank].digest != holders[ranks[0]].digest), None)
        if other is not None:
            raise CannotRun(
                f"save_checkpoint: ranks {ranks[0]} and {other} hold different values of one part of {name!r}"
            )
    _require_whole(name, parts[0].shape, list(regions))
    return [list(regions.values())]


def _require_whole(name: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
    count = int(np.prod(shape, dtype=np.int64))
    there = sum(int(np.prod(region.shape, dtype=np.int64)) for region in regions)
    if there != count or any(first.overlaps(second) for first, second in combinations(regions, 2)):
        raise CannotRun(
            f"save_checkpoint: the parts of {name!r} hold {there} elements of {count}, or overlap; every element must"
            " be in one part, and all parts be either boxes or runs"
        )


def _piece(file: str, key: str, array: ArrayDescription) -> Json:
    piece: dict[str, Json] = {"file": file, "key": key, "digest": array.digest}
    if array.region is not None:
        start = array.region.start
        piece |= {"start": start if isinstance(start, int) else list(start), "shape": list(array.region.shape)}
    return piece
