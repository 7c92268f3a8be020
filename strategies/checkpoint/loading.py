"""Loading: find the checkpoint, prove that its files are as they were written, read what this rank needs of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from strategies.agree import everywhere, on_rank_zero
from strategies.checkpoint import checksums, folder, rng
from strategies.checkpoint.content import Content, read_content, read_index
from strategies.checkpoint.parts import ALL, LoadPlanner
from strategies.checkpoint.restore import Restore
from strategies.checkpoint.states import MODEL, OPTIMIZER, States
from strategies.checkpoint.storage import Index, Reader, carried_out
from strategies.environment import Environment
from strategies.errors import BrokenFile


def load(directory: Path, states: States, environment: Environment) -> tuple[Path, Content] | None:
    """Restore the latest checkpoint below `directory`, or the one that it is; None where there is none.

    Every rank calls it together. Nothing of the engine changes before all files have been found whole.

    Raises:
        BrokenFile: a file is damaged or missing, the checkpoint is of another model or optimizer, or `directory` has
            the name of one checkpoint that is not there; on every rank.
    """
    path = on_rank_zero(lambda: _latest(directory))
    if path is None:
        return None
    require_whole(path, environment.rank, environment.world_size)
    content = read_content(path)
    if content.is_custom:
        raise BrokenFile(path, "was written by a save function of the script's", "read it as that function wrote it")
    reader = Reader(path, with_aliases(read_index(path), content))
    saved: Any = reader.read_metadata().state_dict_metadata
    restore = Restore(path, content, states)
    values = everywhere(lambda: restore.room(saved))
    values |= rng.room(environment.rank, saved)
    carried_out(path, lambda: read_tensors({ALL: values}, storage_reader=reader, planner=LoadPlanner()))
    restore.finish(values)
    rng.restore(values, environment.rank)
    return path, content


def _latest(directory: Path) -> Path | None:
    """What to load; None, which rank 0 says, where there is no checkpoint: a first start, or a mistyped directory.

    Raises:
        BrokenFile: the name is that of one checkpoint, and there is none.
    """
    path = folder.named_latest(directory)
    if path is not None:
        return path
    others = [other.name for other in folder.published(directory.parent)]
    if folder.is_checkpoints_name(directory.name):
        raise BrokenFile(directory, "is not there", f"there are: {', '.join(others) or 'none'}")
    near = folder.nearest(directory)
    hint = f" ({near.name} beside it has)" if near is not None else ""
    print(f"dsplan: {directory} has no checkpoint{hint}: training starts anew", file=sys.stderr, flush=True)
    return None


def require_whole(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check a checkpoint's files against their checksums; each of `ranks` ranks looks at a part of them.

    Raises:
        BrokenFile: naming the file, what is wrong with it, and the newest checkpoint next to it that is whole.
    """
    if (path / ".metadata").is_file():
        read_content(path)

    def check() -> None:
        found = checksums.damage(path, rank, ranks) if path.is_dir() else (path, "is missing")
        if found is not None:
            raise BrokenFile(*found, _remedy(path))

    if ranks == 1:
        check()  # maybe by one rank of many, which the others do not check with
    else:
        everywhere(check)


def with_aliases(index: Index, content: Content) -> Index:
    """An index in which tied tensors are found under all of their names."""
    further = {}
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


def _remedy(path: Path) -> str:
    """What to load instead of a damaged checkpoint."""
    others = [other for other in folder.published(path.parent) if other != path]
    good = next((other for other in others if checksums.damage(other) is None), None)
    return "no checkpoint next to it is whole" if good is None else f"load {good}, the newest that is whole"
