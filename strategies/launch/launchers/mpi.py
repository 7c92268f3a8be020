"""Open MPI's `mpirun`, and MPICH's and Intel's (Hydra): one per attempt.

Sources: mpirun(1) of Open MPI 4.1 and 5.0, and `mpiexec.hydra -help` of MPICH 4.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from hardware_db.errors import DsplanError
from strategies.launch.launchers.process import ProcessLauncher, rank_command

_BY_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)")
_EXIT_CODE = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
_NODE_GONE = re.compile(r"ORTE has lost communication with a remote daemon|lost connection to .*daemon", re.IGNORECASE)
_HOST = re.compile(r"^[ \t]*([^\s#:]+)", re.MULTILINE)
_MISSING = "mpirun is not installed here; install Open MPI (openmpi-bin), or run without --launcher"
# Batch systems whose jobs name their nodes to mpirun.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Further variables that the ranks of other nodes need; Open MPI takes over only what it is told to.
_EXPORTED = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
_EXPORTED_FAMILIES = ("DSPLAN_", "NCCL_", "GLOO_", "ACCELERATE_", "DS_", "HF_", "TORCH_", "CUDA_")


class MpiLauncher(ProcessLauncher):
    """The ranks as processes of one MPI job, which mpirun ends together when one fails."""

    def command(self) -> list[str]:
        """Return the command line of Open MPI, or of Hydra."""
        if shutil.which("mpirun") is None:
            raise DsplanError(_MISSING)
        if self.placement.most_nodes > 1 and self.placement.hostfile is None and not any(map(os.environ.get, _JOBS)):
            raise DsplanError("mpirun finds several nodes in a host file, or in a batch job; name it with --hostfile")
        options = self._open_mpi() if is_open_mpi() else self._hydra()
        return ["mpirun", *options, *self.placement.options, *rank_command(self.spec)]

    def environment(self) -> dict[str, str]:
        """Return the environment, with what root and other nodes need."""
        variables = super().environment()
        if os.geteuid() == 0:
            # In containers everybody is root; Open MPI wants to be told twice that this is meant.
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if self.placement.hostfile is not None and self.placement.most_nodes > 1:
            variables.setdefault("MASTER_ADDR", first_host(Path(self.placement.hostfile)))
        return variables

    def signal(self, number: signal.Signals) -> None:
        """Hand a signal to mpirun, which hands SIGUSR1 on to every rank on every node."""
        self.hand_signal(number)

    def result(self, status: int) -> dict[str, object]:
        """Return how the job's ranks ended."""
        result = job_result(self.output)
        # Above 128 a signal has ended it, before it could say anything of its ranks.
        if 0 < status < 128 and not result["failures"] and "kind" not in result:
            result |= {"kind": "failed", "reason": first_words(self.output) or f"mpirun ended with status {status}"}
        return result

    def _open_mpi(self) -> list[str]:
        nodes, per_node = self.placement.most_nodes, self.spec.processes
        # --bind-to none: Open MPI would tie each rank, and the threads it starts, to one core.
        options = ["-np", str(nodes * per_node), "--bind-to", "none"]
        if self.placement.hostfile is not None:
            options += ["--hostfile", self.placement.hostfile, "--map-by", f"ppr:{per_node}:node"]
        if nodes == 1:
            # A slot per core is what Open MPI counts; how many ranks a node takes has been decided by its GPUs.
            return [*options, "--oversubscribe"]
        names = (name for name in self.environment() if name in _EXPORTED or name.startswith(_EXPORTED_FAMILIES))
        return [*options, *(part for name in sorted(names) for part in ("-x", name))]

    def _hydra(self) -> list[str]:
        nodes, per_node = self.placement.most_nodes, self.spec.processes
        hosts = [] if self.placement.hostfile is None else ["-f", self.placement.hostfile]
        return ["-n", str(nodes * per_node), "-ppn", str(per_node), *hosts]


def is_open_mpi() -> bool:
    """Return whether the `mpirun` here is Open MPI's."""
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in answer.stdout + answer.stderr


def first_host(hostfile: Path) -> str:
    """Return rank 0's host, the first in a host file, `name slots=RANKS` (Open MPI) or `name:RANKS` (Hydra) per line.

    Raises:
        DsplanError: the file cannot be read, or names none.
    """
    try:
        match = _HOST.search(hostfile.read_text())
    except OSError as error:
        raise DsplanError(
            f"{hostfile}: {error.strerror or 'cannot be read'}; name a host file with --hostfile"
        ) from None
    if match is None:
        raise DsplanError(f"{hostfile}: names no host; write a line per node")
    return match[1]


def first_words(output: str) -> str:
    """Return the first line that says something; Open MPI draws lines of dashes around what it says."""
    return next((line.strip()[:500] for line in output.splitlines() if line.strip(" -")), "")


def job_result(output: str) -> dict[str, object]:
    """Return how a job's ranks ended, from what Open MPI has said; it names the first that failed."""
    failures = {int(rank): -int(number) for rank, _, number in _BY_SIGNAL.findall(output)}
    failures |= {int(rank): int(code) for rank, code in _EXIT_CODE.findall(output)}
    result: dict[str, object] = {"failures": failures}
    if _NODE_GONE.search(output):
        result |= {"kind": "lost", "reason": "mpirun has lost the connection to a node"}
    return result
