"""`dsplan run` as a process of its own, as a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware_db.store import open_store

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "scripts" / "examples"
IMAGES = Path(__file__).with_name("images_script.py")
"""A loop of accelerate's over images, which prints the model's class when it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A command that ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Return what stdout held, which has to be one JSON object and nothing else."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def start_run(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """`dsplan run ...`, running."""
    command = [sys.executable, "-m", "dsplan", "run", *map(str, arguments)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # tests/conftest.py puts this tree on the path
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*arguments: str | Path, cwd: Path) -> Finished:
    """`dsplan run ...` to its end."""
    process = start_run(*arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return Finished(status=process.returncode, out=out, err=err)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def check_next_plan(finished: Finished, answer: dict[str, Any]) -> None:
    """Plans that ran out of memory are stored and gave way to one that trained three steps; `answer` proposes none."""
    assert finished.status == 0, finished.err
    assert finished.json["outcome"] == "completed"
    assert finished.json["measured"]["steps"] == 3
    with open_store() as store:
        last, *failed = store.list()
    assert last.outcome == "completed"
    assert failed
    assert {row.outcome for row in failed} == {"out_of_memory"}
    proposed = [plan["plan"] for plan in answer["plans"]]
    assert proposed
    assert not [row for row in failed if row.plan["plan"] in proposed]
    reasons = [item["reason"] for item in answer["rejected"]]
    assert sum("ran out of memory here on" in reason for reason in reasons) == len(failed)
