"""Processes with the variables of a launcher, started together, and what each of them said at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
Variables = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process that ended: its exit status, seconds it took, and the lines it printed."""

    status: int
    seconds: float
    lines: list[str]


class Starter:
    """Starts many processes at once, each forked from one that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("starter.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def run(self, program: str | Path, processes: Sequence[Variables], *arguments: str) -> list[Ended]:
        """Run a program once with each set of variables, all at the same time, to their ends."""
        return self.run_each(program, [(variables, arguments) for variables in processes])

    def run_each(self, program: str | Path, processes: Sequence[tuple[Variables, Sequence[str]]]) -> list[Ended]:
        """As `run`, each process with arguments of its own."""
        assert self._process.stdin
        assert self._process.stdout
        outputs = [str(self._folder / f"output-{next(self._numbers)}") for _ in processes]
        for output, (variables, arguments) in zip(outputs, processes, strict=True):
            job = {"program": str(program), "arguments": arguments, "output": output}
            everything = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
            self._process.stdin.write(json.dumps({**job, "variables": everything}) + "\n")
        self._process.stdin.flush()
        ended = {}
        for _ in outputs:
            told = json.loads(self._process.stdout.readline())
            lines = Path(told["output"]).read_text().splitlines()
            ended[told["output"]] = Ended(status=told["status"], seconds=told["seconds"], lines=lines)
        return [ended[output] for output in outputs]


def torchrun(rank: int, ranks: int, job: int) -> Variables:
    """Return what torchrun sets, or a person who starts ranks by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job),
    }


def open_mpi(rank: int, ranks: int, job: int) -> Variables:
    """Return what `mpirun` of Open MPI 4 sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks),
        "PMIX_NAMESPACE": str(job),
        "MASTER_PORT": str(job),
    }


def slurm(rank: int, ranks: int, job: int) -> Variables:
    """Return what `srun` sets, srun(1)."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(job),
    }


def hydra(rank: int, ranks: int, job: int) -> Variables:
    """Return what `mpirun` of MPICH and of Intel MPI sets."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(ranks),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(ranks),
        "MASTER_PORT": str(job),
    }


def without(variables: Mapping[str, str], *names: str) -> Variables:
    return {name: value for name, value in variables.items() if name not in names}
