"""Saves step 1, and dies by SIGKILL on rank 1 while all write step 2; started again it finishes step 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from dsplan.mpi import CheckpointManager, files

comm = MPI.COMM_WORLD
checkpoints = CheckpointManager(comm, sys.argv[1])
write = files.write


def killed(path: Path, arrays: Sequence[files.FileArray]) -> None:
    """Leave half a file, and die on rank 1."""
    write(path, arrays)
    if comm.rank == 1:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


if checkpoints.latest_step() is None:
    checkpoints.save_checkpoint({"own": np.full(9, comm.rank)}, step=1)
    files.write = killed
comm.Barrier()
if comm.rank == 0:
    print("latest", checkpoints.latest_step(), flush=True)
assert (checkpoints.load_checkpoint()["own"] == comm.rank).all()
checkpoints.save_checkpoint({"own": np.full(9, comm.rank)}, step=2)
