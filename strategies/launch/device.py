"""The device of a run, decided once in the command: the ranks of its node train on it or say why they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hardware_db.errors import DsplanError
from hardware_db.from_json import from_json
from hardware_db.probe import NO_GPU, Gpu, Machine
from hardware_db.probe.nvml import cuda_library_loads
from planner.cluster.probed import largest_slice
from strategies.run_directory.request import ON_CPU, DecidedDevice
from strategies.run_directory.spec import Placement

_ANSWER_SECONDS = 120.0
_QUESTION = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    card = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    gpus.append(dict(
        index=index, name=card.name, vendor="amd" if torch.version.hip else "nvidia",
        compute_capability=f"{major}.{minor}", total_bytes=total, free_bytes=free, used_bytes=total - free,
    ))
print(json.dumps(gpus))
"""
"""Is run by a process of its own: torch costs seconds, and whoever has used CUDA cannot fork ranks that do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The device of a run's ranks on this node."""

    machine: Machine
    """This machine, with GPUs that torch alone sees."""
    device: DecidedDevice | None
    """None where the ranks decide: other nodes than this one may have other devices."""
    gpus: int
    """That can be ranks' own; 0: none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """With which every library in a rank sees what was decided."""
    notice: str = ""
    """A line for people; empty where nothing needs saying."""


def decide(machine: Machine, placement: Placement) -> Decision:
    """Decide what the ranks of this node train on: the GPUs that can be used, a MIG slice, or the processor.

    Where no driver's library lists a GPU, and a driver is here, torch is asked.

    Raises:
        DsplanError: there are GPUs, and torch is built for none.
    """
    usable = machine.usable_gpus
    if _starts_elsewhere(placement) or any(gpu.vendor == "apple" for gpu in usable):
        return Decision(machine=machine, device=None, gpus=len(usable))
    if usable:
        _check_build(machine, usable)
        device = DecidedDevice(gpus=len(usable), name=usable[0].name)
        return Decision(machine=machine, device=device, gpus=len(usable), variables=_variables(machine))
    if (slice_ := largest_slice(machine)) is not None and slice_.uuid:
        device = DecidedDevice(gpus=1, name=slice_.name)
        return Decision(machine=machine, device=device, gpus=1, variables={_VISIBLE: slice_.uuid})
    unlisted = ask_torch() if not machine.gpus and _has_driver() else ()
    if not unlisted:
        variables = {**ON_CPU, _VISIBLE: ""}
        return Decision(machine=machine, device=DecidedDevice(gpus=0), gpus=0, variables=variables)
    return Decision(
        machine=replace(machine, gpus=unlisted),
        device=DecidedDevice(gpus=len(unlisted), name=unlisted[0].name, unlisted=unlisted),
        gpus=len(unlisted),
        notice=f"torch sees {len(unlisted)} x {unlisted[0].name}, which the run takes though no driver lists them: "
        + next(iter(machine.messages), NO_GPU),
    )


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _starts_elsewhere(placement: Placement) -> bool:
    """Return whether ranks may start on other nodes than those on which a command decides for them."""
    if placement.launcher == "mpi":
        return placement.most_nodes > 1 or placement.hostfile is not None
    if placement.launcher == "deepspeed":
        return placement.most_nodes > 1 and placement.node_rank is None
    return placement.is_judged_there


def _check_build(machine: Machine, usable: tuple[Gpu, ...]) -> None:
    if machine.software.torch_cuda == "cpu":
        raise DsplanError(
            f"{len(usable)} x {usable[0].name} are here and torch {machine.software.version('torch')} is built for the"
            " CPU alone; install torch for CUDA (https://pytorch.org/get-started/locally), or train on the CPU:"
            f" {_VISIBLE}= dsplan run"
        )


def _variables(machine: Machine) -> dict[str, str]:
    """Return what has CUDA show the ranks the GPUs that can be used, in the driver's order."""
    usable = machine.usable_gpus
    nvidia = {gpu.name for gpu in usable} if all(gpu.vendor == "nvidia" for gpu in usable) else set()
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if len(nvidia) > 1 and "CUDA_DEVICE_ORDER" not in os.environ else {}
    uuids = [gpu.uuid for gpu in usable if gpu.uuid]
    left_out = [gpu for gpu in machine.gpus if gpu.visible and not gpu.usable]
    if not nvidia or not left_out or len(uuids) < len(usable):
        return order
    return {**order, _VISIBLE: ",".join(uuids)}


def _has_driver() -> bool:
    """Return whether torch could see a GPU: CUDA's library is here, or the device of AMD's compute driver."""
    return cuda_library_loads() or Path("/dev/kfd").exists()


def ask_torch() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees in a process of its own; none where it cannot be asked."""
    command = [sys.executable, "-c", _QUESTION]
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        answer = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
        gpus = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
    return tuple(from_json(Gpu, gpu) for gpu in gpus)
