"""Starts modules of bodies under the real mpirun, once per number of ranks, and hands out what became of each body."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MPIRUN = shutil.which("mpirun")

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpirun and mpi4py"
)


def mpirun(ranks: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Start a Python program on so many ranks of this machine."""
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the cores to those that work
    }
    environment = {
        **os.environ,
        **open_mpi,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(HERE.parents[2]), str(HERE))),
    }
    is_open_mpi = "Open MPI" in _version()
    places = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi else []
    return subprocess.run(
        [str(MPIRUN), *places, "-n", str(ranks), sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=270,
        stdin=subprocess.DEVNULL,
    )


@functools.cache
def outcomes(module: str, ranks: int) -> dict[str, list[str]]:
    """Return what became of each body of a module on so many ranks: its failures."""
    with tempfile.TemporaryDirectory() as directory:
        return run_bodies(module, ranks, Path(directory))


def run_bodies(module: str, ranks: int, directory: Path) -> dict[str, list[str]]:
    """As `outcomes`, in a directory that the test knows."""
    finished = mpirun(ranks, HERE / "mpi_runner.py", module, directory)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    problems: dict[str, list[str]] = json.loads(finished.stdout.strip().splitlines()[-1])
    return problems


def bodies(module: str) -> list[str]:
    """The names of a module's bodies, from its text: importing it would start MPI in this process."""
    tree = ast.parse((HERE / f"{module}.py").read_text("utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


@functools.cache
def _version() -> str:
    return subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True, check=False).stdout
