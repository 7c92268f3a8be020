"""Runs on every rank: `mpirun -n N python mpi_runner.py MODULE [DIRECTORY]` calls each function of a module of bodies.

Rank 0 prints one JSON line: by function, the failures of the ranks, none where all succeeded. A rank that fails alone
leaves the others waiting, so tracebacks of all are printed, and the run ends, after four minutes.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from mpi4py import MPI

from tests.dsplan.mpi.mpi_start import bodies

LIMIT_SECONDS = 240


def main(module: str, directory: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    comm = MPI.COMM_WORLD
    outcomes = {}
    for name in bodies(module):
        body, problem = getattr(import_module(module), name), ""
        try:
            body(comm, Path(directory)) if len(inspect.signature(body).parameters) == 2 else body(comm)
        except Exception:
            problem = f"rank {comm.rank}: {traceback.format_exc()}"
            print(problem, file=sys.stderr, flush=True)
        outcomes[name] = [reported for reported in comm.allgather(problem) if reported]
    if comm.rank == 0:
        print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
