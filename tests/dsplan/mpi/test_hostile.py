"""Hostile checkpoints of dsplan.mpi: each is refused in one line, with nothing read outside of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsplan.mpi import Part, checkpoints
from dsplan.mpi.layout import describe, lay_out
from dsplan.mpi.reading import INDEX, SavedTree
from strategies.errors import DsplanError

FILE = "rank-00000.safetensors"
DEEP = "[" * 5000 + "]" * 5000


def tree_of(rank: int) -> Any:
    """A whole array, one in parts, and plain values."""
    part = Part(values=np.full((32, 2), float(rank)), shape=(64, 2), start=(32 * rank, 0))
    return {"w": np.arange(12.0).reshape(3, 4), "rows": part, "progress": {"epoch": 2, "names": ["a", None]}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return what two ranks save."""
    folder = tmp_path / "run" / "step-00000001"
    folder.mkdir(parents=True)
    trees = [tree_of(rank) for rank in range(2)]
    every = [describe(tree) for tree in trees]
    layout = lay_out([description.arrays for description in every])
    for rank, tree in enumerate(trees):
        checkpoints._write(folder, tree, layout, rank)
    (folder / INDEX).write_text(json.dumps(checkpoints._index(every, layout, 1)))
    (tmp_path / "outside").write_text("{}")
    return folder


def index(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values)
        (folder / INDEX).write_text(json.dumps(values))

    return damage


def piece(**values: Any) -> Callable[[Path], object]:
    return index(lambda all: all["arrays"]["w"][0]["pieces"][0].update(values))


def array(**values: Any) -> Callable[[Path], object]:
    return index(lambda all: all["arrays"]["rows"][0].update(values))


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: ((folder / name).unlink(), make(folder / name))


KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no index": (INDEX, replaced(INDEX, lambda path: None)),
    "an index that is a pipe": (INDEX, replaced(INDEX, os.mkfifo)),
    "an index that is a device": (INDEX, replaced(INDEX, lambda path: path.symlink_to("/dev/zero"))),
    "an index nested 5,000 deep": (INDEX, replaced(INDEX, lambda path: path.write_text(f'{{"x": {DEEP}}}'))),
    "an index with a key twice": (INDEX, replaced(INDEX, lambda path: path.write_text('{"a": 1, "a": 2}'))),
    "another version": (INDEX, index(lambda all: all.update(version=9))),
    "no ranks": (INDEX, index(lambda all: all.update(world_size=0, structure_of_rank=[]))),
    "a tree that is not there": (INDEX, index(lambda all: all.update(structure_of_rank=[7, 7]))),
    "a tree of an unknown kind": (INDEX, index(lambda all: all.update(structures=[{"call": "os.system"}]))),
    "an array that is not there": (INDEX, index(lambda all: all["arrays"].pop("w"))),
    "an unknown dtype": (INDEX, array(dtype="object")),
    "a shape that is a text": (INDEX, array(shape="64")),
    "a shape that is negative": (INDEX, array(shape=[-64, 2])),
    "10^15 elements": (INDEX, array(shape=[10**15])),
    "a hole": (INDEX, index(lambda all: all["arrays"]["rows"][0]["pieces"].pop())),
    "an overlap": (INDEX, index(lambda all: all["arrays"]["rows"][0]["pieces"][1].update(start=[0, 0]))),
    "a piece outside": (INDEX, index(lambda all: all["arrays"]["rows"][0]["pieces"][1].update(start=[40, 0]))),
    "a piece before the array": (INDEX, index(lambda all: all["arrays"]["rows"][0]["pieces"][0].update(start=[-1, 0]))),
    "a piece without a digest": (INDEX, piece(digest=None)),
    "an absolute path": ("/etc/hostname", piece(file="/etc/hostname")),
    "a path that leads up": ("../../outside", piece(file="../../outside")),
    "a key that is not there": (FILE, piece(key="ghost")),
    "another array's key": ("safetensors", piece(key="rows.0")),
    "a file that is a pipe": (FILE, replaced(FILE, os.mkfifo)),
    "a file that is a link out": (FILE, replaced(FILE, lambda path: path.symlink_to("../../outside"))),
    "a header longer than the file": (FILE, replaced(FILE, lambda path: path.write_bytes(b"\xff" * 64))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_checkpoint_is_refused(kind: str, saved: Path) -> None:
    named, damage = KINDS[kind]
    damage(saved)
    for rank, ranks in ((0, 2), (0, 1)):
        with pytest.raises(DsplanError) as refusal:
            SavedTree(saved, rank, ranks).whole()
        line = str(refusal.value)
        assert named in line
        assert line.isprintable()
        assert ";" in line


def test_the_same_checkpoint_without_damage_loads(saved: Path) -> None:
    tree = SavedTree(saved, 0, 1).whole()
    np.testing.assert_array_equal(tree["w"], np.arange(12.0).reshape(3, 4))
    assert tree["rows"][:, 0].tolist() == [0.0] * 32 + [1.0] * 32
    assert tree["progress"] == {"epoch": 2, "names": ["a", None]}
