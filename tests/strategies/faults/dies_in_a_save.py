"""Runs another script whose ranks kill themselves at moments of a save, as `kill -9` that is never late would.

    python dies_in_a_save.py SCRIPT ...

`FAULTS` is a JSON list of {"moment", "rank", "step"}, each of which happens once: a file in the folder `LEDGER` says
so. `step` is the checkpoint's that is written, or for `cleaning` any one that is removed.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from strategies.checkpoint import outbox, retention, storage

FAULTS = json.loads(os.environ["FAULTS"])
LEDGER = Path(os.environ["LEDGER"])


def die(moment: str, name: str) -> None:
    """End this rank if that is asked for at this moment of the checkpoint of a name."""
    for fault in FAULTS:
        is_step = moment == "cleaning" or f"step-{fault['step']:08d}" in name
        if fault["moment"] != moment or fault["rank"] != int(os.environ["RANK"]) or not is_step:
            continue
        try:
            (LEDGER / f"{moment}-{fault['step']}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


def before(moment: str, function: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        die(moment, name_of(*arguments))
        return function(*arguments, **named)

    return call


def written_in_part(function: Callable[..., Any]) -> Callable[..., Any]:
    def write(path: Path, entries: Any, data: Any, notes: Any, durable: bool) -> Any:
        def half() -> Iterator[memoryview]:
            for piece in data:
                yield piece[: len(piece) // 2]
                die("writing", path.parent.name)
                yield piece[len(piece) // 2 :]

        return function(path, entries, half(), notes, durable)

    return write


def removed_in_part(function: Callable[..., Any]) -> Callable[..., Any]:
    def remove(path: Path, *arguments: Any, **named: Any) -> None:
        if Path(path).name.endswith(".old"):
            next(each for each in sorted(Path(path).iterdir()) if each.is_file()).unlink()
            die("cleaning", Path(path).name)
        function(path, *arguments, **named)

    return remove


def patch() -> None:
    parts: Any = (storage, outbox, retention, shutil)
    tensors, notes, publication, trees = parts
    tensors.write = written_in_part(tensors.write)
    # A rank's file is whole, and nobody knows it yet.
    notes.replace_whole = before("written", notes.replace_whole, lambda path, *_: path.parent.name)
    # Every rank's is, and the checkpoint has no name yet; then it has one, and `latest` names the one before.
    publication.publish = before("publishing", publication.publish, lambda directory, name, keep: name)
    publication.replace_whole = before("published", publication.replace_whole, lambda path, text: text)
    trees.rmtree = removed_in_part(trees.rmtree)


if __name__ == "__main__":
    patch()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
