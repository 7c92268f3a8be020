"""Folders of checkpoints below a directory: their names, which is the latest, and which stay.

A checkpoint is written in a folder of another name, renamed when it is complete, and loses the name before its files.
In an object store, where nothing can be renamed, it is complete while its checksums are there, and the latest is the
one whose checksums came last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hardware_db.files import replace_whole, sync
from strategies.checkpoint import object_store
from strategies.checkpoint.content import STATE
from strategies.checkpoint.object_store import BEGUN, MANIFEST, ObjectPath, location
from strategies.checkpoint.reading import read_bytes, shown
from strategies.errors import BrokenFile

KEPT = 2
"""How many of the checkpoints stay that a run saves by itself."""
LATEST = "latest"
_LONGEST_NAME = 4096
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def unused_name(directory: Path, step: int) -> str:
    """Return the name for a checkpoint of a step: no folder has it yet."""
    if isinstance(directory, ObjectPath):
        return _unused_in_store(directory, step)
    name, again = f"step-{step:08d}", 2
    while (directory / name).exists():
        name = f"step-{step:08d}-{again}"
        again += 1
    return name


def begin(directory: Path, step: int) -> str:
    """Make the folder in which a checkpoint is written, clear away what crashes left, and return its name to be.

    Raises:
        OSError: the directory cannot be written.
        Unreachable: the object store cannot be used.
    """
    if isinstance(directory, ObjectPath):
        # Nothing has the name of what another process may still be sending, and of this one nobody takes it.
        name = unused_name(directory, step)
        sweep(directory)
        (directory / name / BEGUN).write_bytes(b"")
        return name
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    name = unused_name(directory, step)
    temporary(directory, name).mkdir()
    return name


def temporary(directory: Path, name: str) -> Path:
    """Return where the checkpoint `name` is written before it is published."""
    return directory / f".{name}.tmp"


def publish(directory: Path, name: str, keep_last: int | None) -> None:
    """Give a complete checkpoint its name, make it the latest, and remove those that are no longer wanted.

    In a store it is both already, by its checksums.

    Raises:
        OSError: the directory cannot be written; `latest` names what it named before.
        Unreachable: the object store cannot be used.
    """
    if isinstance(directory, ObjectPath):
        _remove_unwanted(directory, name, keep_last)
        return
    sync(temporary(directory, name))
    os.rename(temporary(directory, name), directory / name)
    replace_whole(directory / LATEST, name + "\n", durable=True)
    _remove_unwanted(directory, name, keep_last)


def _remove_unwanted(directory: Path, name: str, keep_last: int | None) -> None:
    """Remove earlier checkpoints of the same step as the newest, `name`, and all but the newest `keep_last`."""
    older = [path for path in published(directory) if path.name != name]
    replaced = [path for path in older if _order(path)[0] == _order(directory / name)[0]]
    others = [path for path in older if path not in replaced]
    unwanted = [] if keep_last is None else others[max(0, keep_last - 1) :]
    for path in (*replaced, *unwanted):
        remove(path)


def published(directory: Path) -> list[Path]:
    """Return the checkpoints below a directory, the one that was saved last first."""
    if isinstance(directory, ObjectPath):
        return _published_in_store(directory)
    folders = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (path.stat().st_mtime_ns, _order(path)), reverse=True)


def saved_at(path: Path) -> float:
    """Return when a complete checkpoint was saved, in seconds since 1970.

    Raises:
        OSError: there is none.
    """
    if not isinstance(path, ObjectPath):
        return path.stat().st_mtime
    state = object_store.look_at(path / MANIFEST)
    if state is None:
        raise FileNotFoundError(str(path))
    return float(state["modified"])


def complete_among(texts: Iterable[str]) -> set[str]:
    """Return those of some checkpoints' paths that are complete; a store is asked once for each directory."""
    paths = {text: location(text) for text in texts}
    stores = {path.parent for path in paths.values() if isinstance(path, ObjectPath)}
    there = {path for directory in stores for path in published(directory)}
    return {text for text, path in paths.items() if (path in there if path.parent in stores else path.is_dir())}


def named_latest(directory: Path) -> Path | None:
    """Return the checkpoint to resume from: what `latest` names, or the newest where `latest` is not there yet.

    Raises:
        BrokenFile: `latest` names no checkpoint below the directory.
    """
    if isinstance(directory, ObjectPath):
        return directory if directory.is_dir() else next(iter(published(directory)), None)
    if any(os.path.lexists(directory / name) for name in (STATE, ".metadata", MANIFEST)):
        return directory
    if os.path.lexists(directory / LATEST):
        name = read_bytes(directory, LATEST, _LONGEST_NAME).decode(errors="replace").strip()
        if not is_checkpoints_name(name):
            others = ", ".join(path.name for path in published(directory)[:3]) or "none"
            problem = f"names {shown(name)}, which is no checkpoint's name"
            raise BrokenFile(directory / LATEST, problem, f"name a checkpoint's folder; there are: {others}")
        return _inside(directory, directory / name)
    newest = next(iter(published(directory)), None)
    return newest if newest is None else _inside(directory, newest)


def is_checkpoints_name(name: str) -> bool:
    """Return whether a folder of this name is one checkpoint."""
    return _NAME.fullmatch(name) is not None


def nearest(directory: Path) -> Path | None:
    """Return the directory beside another whose name is most like its own and which has checkpoints."""
    if isinstance(directory, ObjectPath):
        return None  # what lies beside it may be others'
    beside = {path.name: path for path in directory.absolute().parent.glob("*/") if path.name != directory.name}
    near = get_close_matches(directory.name, beside, n=3)
    return next((beside[name] for name in near if published(beside[name])), None)


def write_text(path: Path, text: str) -> None:
    """Write a small file, and wait until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(text, encoding="utf-8")
    sync(path)


def discard(directory: Path, name: str) -> None:
    """Remove what was written of a checkpoint that will not be published."""
    if isinstance(directory, ObjectPath):
        if not (directory / name).is_dir():  # a write whose answer was lost has come to pass all the same
            object_store.remove_all(directory / name)
        return
    shutil.rmtree(temporary(directory, name), ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what crashes left behind."""
    if isinstance(directory, ObjectPath):
        for folder, state in _folders_in_store(directory):
            if state is None:
                object_store.remove_all(folder)
        return
    for path in directory.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. A folder with a checkpoint's name is complete, so it loses the name before it loses files.

    Raises:
        OSError: it cannot be renamed.
        Unreachable: the object store cannot be used.
    """
    if isinstance(path, ObjectPath):
        (path / MANIFEST).unlink()
        object_store.remove_all(path)
        return
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _inside(directory: Path, path: Path) -> Path:
    """Return a checkpoint that was not named but found, and so has to lie below the directory.

    Raises:
        BrokenFile: a link leads out of it.
    """
    if path.is_symlink() and directory.resolve() not in path.resolve().parents:
        raise BrokenFile(path, f"is a link out of {directory}", "name what it leads to, if that is meant")
    return path


def _folders_in_store(directory: Path) -> list[tuple[Path, Mapping[str, Any] | None]]:
    """Return the checkpoints below an address, and what is there of their checksums."""
    folders = [directory / name for name in object_store.names_in(directory) if is_checkpoints_name(name)]
    return list(zip(folders, object_store.look_at_all([path / MANIFEST for path in folders]), strict=True))


def _published_in_store(directory: Path) -> list[Path]:
    complete = [(state["modified"], _order(path), path) for path, state in _folders_in_store(directory) if state]
    return [path for _, _, path in sorted(complete, reverse=True)]


def _unused_in_store(directory: Path, step: int) -> str:
    """Return a name behind those of all checkpoints of a step, also of those that are not complete."""
    name = f"step-{step:08d}"
    orders = (_order(directory / other) for other in object_store.names_in(directory))
    again = max((number for other, number in orders if other == step), default=0)
    return f"{name}-{again + 1}" if again else name


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else (-1, 0)
