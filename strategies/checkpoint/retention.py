"""Folders of checkpoints below a directory: their names, which is the latest, and which stay.

A checkpoint is written in a folder of another name, renamed when it is complete, and loses the name before its files.
"""

from __future__ import annotations

import os
import re
import shutil
from difflib import get_close_matches
from pathlib import Path

from hardware_db.files import replace_whole, sync
from strategies.checkpoint.content import STATE
from strategies.checkpoint.reading import read_bytes, shown
from strategies.errors import BrokenFile

KEPT = 2
"""How many of the checkpoints stay that a run saves by itself."""
LATEST = "latest"
_LONGEST_NAME = 4096
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def unused_name(directory: Path, step: int) -> str:
    """Return the name for a checkpoint of a step: no folder has it yet."""
    name, again = f"step-{step:08d}", 2
    while (directory / name).exists():
        name = f"step-{step:08d}-{again}"
        again += 1
    return name


def begin(directory: Path, step: int) -> str:
    """Make the folder in which a checkpoint is written, clear away what crashes left, and return its name to be.

    Raises:
        OSError: the directory cannot be written.
    """
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

    Raises:
        OSError: the directory cannot be written; `latest` names what it named before.
    """
    sync(temporary(directory, name))
    os.rename(temporary(directory, name), directory / name)
    replace_whole(directory / LATEST, name + "\n", durable=True)
    older = [path for path in published(directory) if path.name != name]
    replaced = [path for path in older if _order(path)[0] == _order(directory / name)[0]]
    others = [path for path in older if path not in replaced]
    unwanted = [] if keep_last is None else others[max(0, keep_last - 1) :]
    for path in (*replaced, *unwanted):
        remove(path)


def published(directory: Path) -> list[Path]:
    """Return the checkpoints below a directory, the one that was saved last first."""
    folders = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (path.stat().st_mtime_ns, _order(path)), reverse=True)


def named_latest(directory: Path) -> Path | None:
    """Return the checkpoint to resume from: what `latest` names, or the newest where `latest` is not there yet.

    Raises:
        BrokenFile: `latest` names no checkpoint below the directory.
    """
    if any(os.path.lexists(directory / name) for name in (STATE, ".metadata", "checksums.json")):
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
    shutil.rmtree(temporary(directory, name), ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what crashes left behind."""
    for path in directory.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. A folder with a checkpoint's name is complete, so it loses the name before it loses files.

    Raises:
        OSError: it cannot be renamed.
    """
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


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else (-1, 0)
