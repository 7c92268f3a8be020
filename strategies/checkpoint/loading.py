"""Load a checkpoint: find it, read and check all of it on all ranks, and only then hand it to the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from hardware_db.notices import notice
from strategies.checkpoint import retention, rng, safefile
from strategies.checkpoint.content import (
    STATE,
    TENSORS,
    Content,
    Index,
    SavedTensor,
    content_of,
    read_index,
    require_no_pickles,
    require_progress,
)
from strategies.checkpoint.object_store import ObjectPath, names_in
from strategies.checkpoint.parts import ALL, LoadPlanner
from strategies.checkpoint.reading import Damaged, header_of, opened, shown
from strategies.checkpoint.restore import Restore
from strategies.checkpoint.safefile import DTYPES, FileSum
from strategies.checkpoint.states import MODEL, OPTIMIZER, States
from strategies.checkpoint.storage import Reader, carried_out, is_ranks_file
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import BrokenFile, DsplanError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A checkpoint whose lists are in order: what they say, and the size and checksum of every file."""

    path: Path
    content: Content
    index: Index
    sums: Mapping[str, FileSum]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A checkpoint that every rank can load: all that can be wrong with it has been looked for.

    Attributes:
        small: what has been read already: states that are one number, and random states.
    """

    path: Path
    content: Content
    reader: Reader
    restore: Restore
    small: Mapping[str, torch.Tensor]
    rank: int

    def take_over(self) -> None:
        """Read the tensors into the engine; every rank calls it together.

        Raises:
            BrokenFile: the disk failed after all had been read once.
        """
        values = self.restore.room()
        try:
            _read(self.path, self.reader, values)
        except DsplanError as problem:
            half = "the engine has a part of it: load another checkpoint before it trains on"
            raise BrokenFile(self.path, f"could not be read a second time ({problem})", half) from None
        self.restore.finish({**values, **self.small})
        rng.restore(self.small, self.rank)


def check(
    directory: Path, states: States, environment: Environment, require: Callable[[Path, Content], None]
) -> Checked | None:
    """Find the latest checkpoint below `directory`, or the one that it is, and check all of it; None if there is none.

    Every rank calls it together. Nothing of the engine changes. `require` raises where the engine cannot take what is
    no tensor.

    Raises:
        BrokenFile: a file is damaged or missing, the checkpoint is of another model or optimizer, or `directory` has
            the name of one checkpoint that is not there; on every rank.
    """
    path = on_rank_zero(lambda: _latest(directory))
    if path is None:
        return None
    rank, ranks = environment.rank, environment.world_size

    def look() -> tuple[Opened, Reader, Restore]:
        checkpoint = open_checkpoint(path, rank, ranks)
        content = checkpoint.content
        if content.is_custom:
            require_bytes(checkpoint, rank, ranks)
            problem = "was written by a save function of the script's"
            raise BrokenFile(path, problem, "read it as that function wrote it")
        reader = Reader(path, with_aliases(checkpoint.index, content))
        restore = Restore(path, content, states, _saved(reader))
        restore.check()
        require_progress(path, content.progress)
        require(path, content)
        require_bytes(checkpoint, rank, ranks)
        return checkpoint, reader, restore

    checkpoint, reader, restore = everywhere(lambda: _name_remedy(path, look))
    small = {**restore.numbers_room(), **rng.room(rank, _saved(reader))}
    _read(path, reader, small)

    def look_at_small() -> None:
        restore.check_numbers(small)
        try:
            rng.require(small, rank)
        except ValueError as problem:
            raise Damaged(path, str(problem)) from None

    everywhere(lambda: _name_remedy(path, look_at_small))
    if environment.is_main:
        _name_strays(checkpoint)
    return Checked(path=path, content=checkpoint.content, reader=reader, restore=restore, small=small, rank=rank)


def open_checkpoint(path: Path, share: int = 0, shares: int = 1) -> Opened:
    """Read a checkpoint's lists, and compare them with each other and with the files, which are not read yet.

    Looks at every `shares`-th file, beginning with `share`: ranks divide the work.

    Raises:
        BrokenFile: something of it is missing, damaged, or not as dsplan writes it.
    """
    if not path.is_dir():
        raise Damaged(path, "is missing")
    require_no_pickles(path)
    sums = safefile.read(path)
    content = content_of(path, safefile.checked_bytes_of(path, STATE, sums))
    if content.is_custom:
        checkpoint = Opened(path=path, content=content, index={}, sums=sums)
        for name in _data_files(checkpoint)[share::shares]:
            safefile.require_size(path, name, sums[name])
        return checkpoint
    index = read_index(path, safefile.checked_bytes_of(path, TENSORS, sums))
    checkpoint = Opened(path=path, content=content, index=index, sums=sums)
    boxes = _boxes_by_file(checkpoint)
    for name in _data_files(checkpoint)[share::shares]:
        safefile.require_size(path, name, sums[name])
        _require_boxes(path, name, boxes[name])
    return checkpoint


def require_bytes(checkpoint: Opened, share: int = 0, shares: int = 1) -> None:
    """Read every `shares`-th file once, from `share` on, and raise `Damaged` for one that is not as it was written."""
    for name in _data_files(checkpoint)[share::shares]:
        safefile.require_bytes(checkpoint.path, name, checkpoint.sums[name])


def open_whole(path: Path) -> Opened:
    """Open a checkpoint that is whole; one process looks at all of it.

    Raises:
        BrokenFile: naming the file, what is wrong with it, and the newest checkpoint next to it that is whole.
    """

    def look() -> Opened:
        checkpoint = open_checkpoint(path)
        require_bytes(checkpoint)
        return checkpoint

    return _name_remedy(path, look)


def with_aliases(index: Index, content: Content) -> Index:
    """Return an index in which tied tensors are found under all of their names."""
    further: dict[str, SavedTensor] = {}
    by_name: dict[str, list[str]] = {}
    for full in index:
        kind, _, rest = full.partition("/")
        if f"{kind}/" == MODEL:
            by_name.setdefault(rest, []).append(full)
        elif f"{kind}/" == OPTIMIZER:
            by_name.setdefault(rest.partition("/")[2], []).append(full)
    for alias, name in content.aliases.items():
        for full in by_name.get(name, ()):
            further[full.removesuffix(name) + alias] = index[full]
    return {**index, **further}


def _latest(directory: Path) -> Path | None:
    """Return what to load; None, which rank 0 says, for no checkpoint: a first start, or a mistyped directory.

    Raises:
        BrokenFile: the name is that of one checkpoint, and there is none.
    """
    path = retention.named_latest(directory)
    if path is not None:
        return path
    others = [other.name for other in retention.published(directory.parent)]
    if retention.is_checkpoints_name(directory.name):
        raise BrokenFile(directory, "is not there", f"there are: {', '.join(others) or 'none'}")
    near = retention.nearest(directory)
    hint = f" ({near.name} beside it has)" if near is not None else ""
    notice(f"{directory} has no checkpoint{hint}: training starts anew")
    return None


def _read(path: Path, reader: Reader, values: dict[str, Any]) -> None:
    carried_out(path, lambda: read_tensors({ALL: values}, storage_reader=reader, planner=LoadPlanner()))


def _saved(reader: Reader) -> Any:
    return reader.read_metadata().state_dict_metadata


def _data_files(checkpoint: Opened) -> list[str]:
    return sorted(name for name in checkpoint.sums if name not in (STATE, TENSORS))


def _boxes_by_file(checkpoint: Opened) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Return key, dtype and shape of what each file has to hold.

    Raises:
        Damaged: the list of tensors and that of checksums are not of the same files.
    """
    path = checkpoint.path / TENSORS
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in _data_files(checkpoint)}
    for name, tensor in checkpoint.index.items():
        if tensor.dtype not in DTYPES:
            raise Damaged(path, f"{shown(name)} is of dtype {shown(tensor.dtype)}, which dsplan does not know")
        for box in tensor.boxes:
            if box.file not in files:
                raise Damaged(path, f"{shown(name)} lies in {shown(box.file)}, which {safefile.FILE} does not list")
            files[box.file][box.key] = (tensor.dtype, box.sizes)
    stray = next((name for name, keys in files.items() if not keys and not is_ranks_file(name)), None)
    if stray is not None:
        raise Damaged(checkpoint.path / safefile.FILE, f"lists {shown(stray)}, which holds nothing of the checkpoint")
    return files


def _require_boxes(path: Path, name: str, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    with opened(path, name) as file:
        stored = header_of(file, path / name)
    for key in {**expected, **stored}:
        if key not in stored:
            raise Damaged(path / name, f"has no {shown(key)}, which {TENSORS} places in it")
        if key not in expected:
            raise Damaged(path / name, f"has {shown(key)}, which {TENSORS} does not know")
        has = (stored[key].dtype, stored[key].shape)
        if has != expected[key]:
            (dtype, shape), (listed, sizes) = has, expected[key]
            problem = f"has {shown(key)} as {dtype} {list(shape)}, and {TENSORS} as {listed} {list(sizes)}"
            raise Damaged(path / name, problem)


def _name_remedy(path: Path, look: Callable[[], T]) -> T:
    """Return what `look` returns; where it finds damage, name the newest checkpoint that can be loaded instead."""
    try:
        return look()
    except Damaged as damaged:
        raise BrokenFile(damaged.path, damaged.problem, _remedy(path)) from None


def _remedy(path: Path) -> str:
    """Return what to load instead of a damaged checkpoint."""
    others = [other for other in retention.published(path.parent) if other != path]
    good = next((other for other in others if _is_whole(other)), None)
    return "no checkpoint next to it is whole" if good is None else f"load {good}, the newest that is whole"


def _is_whole(path: Path) -> bool:
    try:
        require_bytes(open_checkpoint(path))
    except DsplanError:
        return False
    return True


def _name_strays(checkpoint: Opened) -> None:
    """Say which files lie in a checkpoint's folder that are not the checkpoint's; nobody opens them."""
    path, own = checkpoint.path, {safefile.FILE, *(PurePosixPath(name).parts[0] for name in checkpoint.sums)}
    names = names_in(path) if isinstance(path, ObjectPath) else os.listdir(path)
    strays = sorted(name for name in names if name not in own and not name.startswith("."))
    if strays:
        others = f" and {len(strays) - 1} more are" if len(strays) > 1 else " is"
        notice(f"{path}: {shown(strays[0])}{others} none of its files and not read; move it out of the folder")
