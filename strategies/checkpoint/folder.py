"""The directory of checkpoints: names, publication, clearing away.

A folder gets its final name by one rename when all of it is on disk, and never changes afterwards; then `latest` is
replaced by one rename. A step that is saved again gets a second folder (`step-00000120-2`) and the first one goes when
`latest` names the second. So at every instant `latest` names a complete checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from difflib import get_close_matches
from pathlib import Path

from strategies.checkpoint.reading import read_bytes, shown
from strategies.errors import BrokenFile

LATEST = "latest"
STATE = "state.json"
_LONGEST_NAME = 4096
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def unused_name(directory: Path, step: int) -> str:
    """The name for a checkpoint of a step: no folder has it yet."""
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
    """Where the checkpoint `name` is written before it is published."""
    return directory / f".{name}.tmp"


def publish(directory: Path, name: str, keep_last: int | None) -> None:
    """Give a complete checkpoint its name, make it the latest, and remove those that are no longer wanted.

    Raises:
        OSError: the directory cannot be written; `latest` names what it named before.
    """
    _sync(temporary(directory, name))
    os.rename(temporary(directory, name), directory / name)
    replace_text(directory / LATEST, name + "\n")
    older = [path for path in published(directory) if path.name != name]
    replaced = [path for path in older if _order(path)[0] == _order(directory / name)[0]]
    others = [path for path in older if path not in replaced]
    unwanted = [] if keep_last is None else others[max(0, keep_last - 1) :]
    for path in (*replaced, *unwanted):
        remove(path)


def published(directory: Path) -> list[Path]:
    """The checkpoints below a directory, the one that was saved last first."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, _order(path)), reverse=True)


def named_latest(directory: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` names, or the newest there is where `latest` is not there yet.

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
    """Whether a folder of this name is one checkpoint."""
    return _NAME.fullmatch(name) is not None


def nearest(directory: Path) -> Path | None:
    """The directory beside another whose name is most like its own and which has checkpoints."""
    beside = {path.name: path for path in directory.absolute().parent.glob("*/") if path.name != directory.name}
    near = get_close_matches(directory.name, beside, n=3)
    return next((beside[name] for name in near if published(beside[name])), None)


def write_text(path: Path, text: str) -> None:
    """Write a small file, and wait until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a small file at once.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    new = path.with_name(f".{path.name}.tmp")
    write_text(new, text)
    os.replace(new, path)
    _sync(path.parent)


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
    """A checkpoint that was not named but found, and so has to lie below the directory.

    Raises:
        BrokenFile: a link leads out of it.
    """
    if path.is_symlink() and directory.resolve() not in path.resolve().parents:
        raise BrokenFile(path, f"is a link out of {directory}", "name what it leads to, if that is meant")
    return path


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else (-1, 0)


def _sync(folder: Path) -> None:
    """Wait until the disk has a folder's names; Windows cannot, and writes them by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
