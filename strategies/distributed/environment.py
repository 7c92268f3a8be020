"""The environment of a process: its rank, the world size, and its device."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.vocabulary import GROUP_BACKENDS
from strategies.distributed.launcher_env import ProcessVariables, read_own_variables, read_process_variables
from strategies.distributed.rendezvous import meet
from strategies.errors import CannotRun
from strategies.run_directory.request import ON_CPU, DecidedDevice, plan_request
from strategies.torch_compat.distributed import HashStore, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A process among its peers; the words are torchrun's."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def spans_nodes(self) -> bool:
        """True if other nodes take part; alike on every rank, also where nodes hold unequal numbers of ranks."""
        return self.local_world_size < self.world_size


def join() -> Environment:
    """Read who this process is, take the local GPU, and join the process group where there are several ranks.

    Understands torchrun, Open MPI, SLURM, MPICH and Intel MPI; a process that none of them started is alone. All ranks
    are checked against each other before the first collective. A group that the script has joined already is used as
    it is.

    Raises:
        CannotRun: the launcher's variables, the ranks or their GPUs do not fit together, or a rank does not come.
    """
    if dist.is_initialized():
        process = read_process_variables(
            {**os.environ, "RANK": f"{dist.get_rank()}", "WORLD_SIZE": f"{dist.get_world_size()}"}
        )
    else:
        process = read_own_variables()
    environment = Environment(
        rank=process.rank,
        local_rank=process.local_rank,
        world_size=process.world_size,
        local_world_size=process.local_world_size,
        device=_device(process),
    )
    if process.world_size > 1:
        ensure_group(environment)
    return environment


def init_distributed(dist_backend: str | None = None) -> None:
    """Join the job's process group, which `initialize` does too, for scripts that communicate before that.

    Args:
        dist_backend: None, or the library that serves this rank's device: nccl on a GPU, gloo on a CPU.

    Raises:
        CannotRun: `dist_backend` is another, or as `join`.
    """
    environment = join()
    usual = "nccl" if environment.device.type == "cuda" else "gloo"
    if dist_backend not in (None, usual):
        raise CannotRun(
            f"init_distributed: dist_backend is {dist_backend!r} and ranks on {environment.device.type} use {usual};"
            " leave it out"
        )
    ensure_group(environment)


def meet_before_script() -> Store | None:
    """Have the ranks of a launched script meet before its code runs; return their store, None for a process alone.

    A mistake in how they were started is reported within half a minute, however long the script would load its model.

    Raises:
        CannotMeet: they do not come or do not agree, or their launcher's variables do not fit together.
        CannotRun: a process alone has not the GPU that was decided for it.
    """
    process = read_own_variables()
    device, complaint = device_name(process.local_rank)
    if device == "cpu":
        os.environ.update({name: value for name, value in ON_CPU.items() if name not in os.environ})
    if process.world_size > 1:
        return meet(process, device, complaint)
    if complaint:
        raise CannotRun(complaint)
    return None


def ensure_group(environment: Environment) -> None:
    """Join the default process group unless this process is in it; a lone process makes a group of its own.

    Raises:
        CannotMeet: the ranks do not come or do not agree.
    """
    if dist.is_initialized():
        return
    # Objects and metadata of checkpoints travel over gloo also where tensors travel over NCCL.
    backend = GROUP_BACKENDS if environment.device.type == "cuda" else "gloo"
    rank, world_size = environment.rank, environment.world_size
    store = HashStore() if world_size == 1 else meet(read_own_variables(), str(environment.device))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _device(process: ProcessVariables) -> torch.device:
    """Make this rank's GPU the current one, or take the CPU; a rank without a GPU notifies the others and ends."""
    name, complaint = device_name(process.local_rank)
    if complaint and process.world_size > 1 and not dist.is_initialized():
        meet(process, name, complaint)
    if complaint:
        raise CannotRun(complaint)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_name(local_rank: int) -> tuple[str, str]:
    """Return the device of a local rank, as torch writes it, and what is wrong with it.

    It is the one that `dsplan run` has decided on; where nobody has, it is a GPU where torch sees any.
    """
    decided = plan_request().device
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if decided is not None and local_rank >= visible and decided.gpus:
        return f"cuda:{local_rank}", _why_not_decided(decided, local_rank, visible)
    if not visible or (decided is not None and not decided.gpus):
        return "cpu", ""
    complaint = ""
    if local_rank >= visible:
        complaint = (
            f"local rank {local_rank} has no GPU: this machine shows {visible}; start at most that many ranks per node"
        )
    return f"cuda:{local_rank}", complaint


def _why_not_decided(decided: DecidedDevice, local_rank: int, visible: int) -> str:
    """Return what a rank lacks of the GPUs that its command counted, where, and what to do."""
    where = f"local rank {local_rank} on {socket.gethostname()}"
    counted = f"the driver lists {decided.gpus} x {decided.name}"
    if visible:
        remedy = f"start {visible} with --nproc {visible}, or `dsplan doctor` to see what the others lack"
        return f"{where} has no GPU: {counted}, and torch sees {visible} of them; {remedy}"
    remedy = "install torch for this driver (`dsplan doctor`), or train on the CPU: CUDA_VISIBLE_DEVICES= dsplan run"
    return f"{where} has no GPU: {counted}, and torch {torch.__version__} sees none ({_refusal()}); {remedy}"


def _refusal() -> str:
    """Return torch's own reason for seeing no GPU, in one line."""
    try:
        torch.zeros(1, device="cuda")
    except Exception as problem:  # AssertionError of a build without CUDA, RuntimeError of a driver
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0].strip().rstrip(".")
    return "it does not say why"
