"""Runs the scripts beside this file, each of which hands configs to the library that will read them."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware_db.files import provide_torch_extensions
from tests.preload import PRELOAD

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
    """Return what `script` prints last, as JSON, for `question` on its standard input.

    Its process is forked from the one that ranks of tests are forked from, which has imported torch and transformers.
    """
    streams = {name: directory / f"{script}.{name}" for name in ("stdin", "stdout", "stderr")}
    streams["stdin"].write_text(json.dumps(question))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_run, args=(HERE / script, directory, streams))
    process.start()
    process.join(_PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, streams["stderr"].read_text()[-4000:]
    return json.loads(streams["stdout"].read_text().strip().splitlines()[-1])


def _run(script: Path, directory: Path, streams: dict[str, Path]) -> None:
    """Run a script as if Python had been started with it."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        with streams[name].open("w") as stream:
            os.dup2(stream.fileno(), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    with streams["stdin"].open() as sys.stdin:
        runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


def launch(command: list[str], *, directory: Path) -> list[dict[str, Any]]:
    """The JSON objects that the ranks of `command` wrote to `rank*.json` in `directory`."""
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, timeout=_PATIENCE)
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


def write(files: dict[str, str], directory: Path) -> None:
    for name, text in files.items():
        (directory / name).write_text(text)
