"""Runs the scripts beside this file, each of which hands configs to the library that will read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware_db.files import provide_torch_extensions

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
_PATIENCE = 900  # pytest's own limit comes first; where that was raised, DeepSpeed compiles on a busy core
# No GPU, whatever the machine has: the configs are read here, not run on it. The commands beside Python come last on
# the path, so that every process finds the same ninja: DeepSpeed builds its operator anew for each version it meets.
ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(REPOSITORY),
    "PATH": os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent))),
}
provide_torch_extensions(ENVIRONMENT)


def ask(script: str, question: object, *, directory: Path) -> Any:
    """What `script` prints last, as JSON, for `question` on its standard input."""
    process = subprocess.run(
        [sys.executable, str(HERE / script)],
        input=json.dumps(question), capture_output=True, text=True, cwd=directory, env=ENVIRONMENT, timeout=_PATIENCE,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


def launch(command: list[str], *, directory: Path) -> list[dict[str, Any]]:
    """The JSON objects that the ranks of `command` wrote to `rank*.json` in `directory`."""
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, timeout=_PATIENCE)
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


def write(files: dict[str, str], directory: Path) -> None:
    for name, text in files.items():
        (directory / name).write_text(text)
