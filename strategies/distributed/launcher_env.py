"""The place of a process among its peers, as its launcher describes it: torchrun, Open MPI, SLURM, MPICH, Intel MPI.

Each launcher describes its processes in variables of its own. They are read into one value, checked, and set again as
torchrun's, which torch, DeepSpeed and accelerate read. Sources: torchrun's "Environment Variables", mpirun(1) of Open
MPI 4, srun(1) "OUTPUT ENVIRONMENT VARIABLES", and the Hydra process manager of MPICH, which Intel MPI starts with too.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from strategies.errors import CannotMeet

Variables = Mapping[str, str]
_LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's
_FIRST_PORT, _PORTS = 20000, 12000  # below the range that Linux gives to outgoing connections


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address at which rank 0 waits for the others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessVariables:
    """A process's place among its peers.

    Raises:
        CannotMeet: the numbers contradict each other.
    """

    source: str
    """Whose variables say it."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting_point: Address | None = None
    """Rank 0's address; None for a process alone."""
    advice: str = ""
    """What may be wrong where the ranks do not fit together."""

    def __post_init__(self) -> None:
        if self.world_size == 1 and self.rank == 0:
            return  # a process alone may name its GPU by a local rank
        self._within("rank", self.rank, self.world_size)
        self._within("local rank", self.local_rank, self.local_world_size)
        if self.local_world_size > self.world_size:
            raise CannotMeet(
                f"{self.source} says {self.local_world_size} ranks on this node and {self.world_size} in all; start all"
                " ranks with one launch command"
            )

    def _within(self, what: str, number: int, count: int) -> None:
        if not 0 <= number < count:
            raise CannotMeet(
                f"{self.source} says {what} {number} of {count}; {what}s count from 0, so the highest is {count - 1}"
            )


def read_process_variables(variables: Variables) -> ProcessVariables:
    """Read this process's place as its launcher describes it, alone where none does.

    torchrun's variables come first, because a script or a wrapper may have set them on purpose.

    Raises:
        CannotMeet: a variable is missing or is no number, or they contradict each other.
    """
    readers = [read for marks, read in _LAUNCHERS if any(mark in variables for mark in marks)]
    if len(readers) > 1 and readers[0] is _torchrun and not {"RANK", "WORLD_SIZE"} <= variables.keys():
        del readers[0]  # `export WORLD_SIZE=8` in a batch script is no rank
    if readers:
        process = readers[0](variables)
        return replace(process, advice=_contradiction(process, variables, readers[1:]))
    number = _Numbers(variables, "the environment")
    return ProcessVariables(source=number.source, local_rank=number("LOCAL_RANK", 0))


def _contradiction(own: ProcessVariables, variables: Variables, others: Sequence[Reader]) -> str:
    """Return what may be wrong where exported variables (`RANK=0` in a batch script) hide a launcher's, or ""."""
    if "TORCHELASTIC_RUN_ID" in variables:  # torchrun itself set them, which may run within srun
        return ""
    for read in others:
        with contextlib.suppress(CannotMeet):
            other = read(variables)
            if (other.rank, other.world_size) != (own.rank, own.world_size):
                return (
                    f"{other.source} counts one of them as rank {other.rank} of {other.world_size}, which RANK and"
                    " WORLD_SIZE hide: unset both"
                )
    return ""


def publish_process_variables(process: ProcessVariables, variables: MutableMapping[str, str]) -> None:
    """Set torchrun's variables, for torch and every library that reads them; nothing for a process alone."""
    if process.meeting_point is None:
        return
    variables.update(
        RANK=str(process.rank),
        WORLD_SIZE=str(process.world_size),
        LOCAL_RANK=str(process.local_rank),
        LOCAL_WORLD_SIZE=str(process.local_world_size),
        MASTER_ADDR=process.meeting_point.host,
        MASTER_PORT=str(process.meeting_point.port),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-06,9],cpu1` is `gpu03`."""
    name = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts)
    return "".join(part or "" for part in name.groups()) if name else hosts


def tasks_on_node(counts: str, node: int) -> int:
    """Read the tasks on one node from SLURM's count per node: in `4(x2),3` nodes 0 and 1 have 4, node 2 has 3.

    Raises:
        CannotMeet: there is no such node in it.
    """
    for entry in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise CannotMeet(f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, which has no count for this node; start with srun")


def _torchrun(variables: Variables) -> ProcessVariables:
    number = _Numbers(variables, "the environment (RANK, WORLD_SIZE)")
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    process = ProcessVariables(
        source=number.source,
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", rank),
        # DeepSpeed's launcher, whose other variables are torchrun's, calls it LOCAL_SIZE.
        local_world_size=number("LOCAL_WORLD_SIZE", number("LOCAL_SIZE", world_size)),
    )
    return _add_address(process, number)


def _open_mpi(variables: Variables) -> ProcessVariables:
    number, prefix = _Numbers(variables, "Open MPI"), "OMPI_COMM_WORLD_"
    process = number.process(*(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    return _add_address(process, number, job=variables.get("PMIX_NAMESPACE", ""))


def _slurm(variables: Variables) -> ProcessVariables:
    number = _Numbers(variables, "SLURM")
    process = ProcessVariables(
        source=number.source,
        rank=number("SLURM_PROCID"),
        world_size=number("SLURM_STEP_NUM_TASKS"),
        local_rank=number("SLURM_LOCALID"),
        local_world_size=tasks_on_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""), number("SLURM_NODEID")),
    )
    # Clusters number their jobs by themselves, and slurmd of several may share a machine.
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
    job = ".".join(variables.get(name, "") for name in names)
    return _add_address(process, number, job=job, host=first_host(variables.get("SLURM_STEP_NODELIST", "")))


def _hydra(variables: Variables) -> ProcessVariables:
    number = _Numbers(variables, "MPICH or Intel MPI")
    process = number.process("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _add_address(process, number)


Reader = Callable[[Variables], ProcessVariables]
_LAUNCHERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("RANK", "WORLD_SIZE"), _torchrun),
    (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), _open_mpi),
    # Only what srun starts is a rank; SLURM's other variables are set in the shell of a batch script too.
    (("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"), _slurm),
    (("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _hydra),
)
"""The variables that give a launcher away, and who reads it, in the order of precedence."""


class _Numbers:
    """The variables that are numbers, with one-line refusals for those that are missing or are none."""

    def __init__(self, variables: Variables, source: str) -> None:
        self.variables, self.source = variables, source

    def __call__(self, name: str, default: int | None = None) -> int:
        text = self.variables.get(name, "").strip()
        if not text and default is not None:
            return default
        if not text:
            raise CannotMeet(
                f"{self.source} has not set {name} for this process; start all ranks with one launch command"
            )
        if not text.isdecimal():
            raise CannotMeet(f"the environment variable {name} is {text!r}; it must be a whole number")
        return int(text)

    def process(self, rank: str, world: str, local_rank: str, local_world: str) -> ProcessVariables:
        """Read a place from the variables of these names."""
        return ProcessVariables(
            source=self.source,
            rank=self(rank),
            world_size=self(world),
            local_rank=self(local_rank),
            local_world_size=self(local_world),
        )


def _add_address(process: ProcessVariables, number: _Numbers, *, job: str = "", host: str = "") -> ProcessVariables:
    """Add rank 0's address: MASTER_ADDR, else `host`, else this machine where all ranks are on it.

    Jobs on one machine must not meet each other, so each has a port of its own where `job` tells them apart.
    """
    named = number.variables.get("MASTER_ADDR", "")
    if process.world_size == 1 and not named:
        return process
    here = _LOCALHOST if process.local_world_size == process.world_size else ""
    address = named or host or here
    if not address:
        raise CannotMeet(
            f"{process.source} starts {process.world_size} ranks on several nodes and MASTER_ADDR is not set;"
            " set it to the host of rank 0 on every rank"
        )
    port = number("MASTER_PORT", _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS if job else DEFAULT_PORT)
    if not 0 < port < 1 << 16:
        raise CannotMeet(f"the environment variable MASTER_PORT is {port}; ports are 1 to 65535")
    return replace(process, meeting_point=Address(host=address, port=port))


def read_own_variables() -> ProcessVariables:
    """Read this process's place, and set torchrun's variables to it.

    Raises:
        CannotMeet: as `read_process_variables`.
    """
    process = read_process_variables(os.environ)
    publish_process_variables(process, os.environ)
    return process
