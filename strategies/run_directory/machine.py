"""The machine that a run has: its GPUs without what its own ranks hold of them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hardware_db.probe import Gpu, Machine, probe
from strategies.run_directory.request import PlanRequest
from strategies.variables import RUN_DIRECTORY


def own_machine(variables: Mapping[str, str] = os.environ) -> Machine:
    """Return this machine as a run finds it, by the variables of a rank, or of a launch.

    Where no driver's library lists a GPU, it has those that `dsplan run` saw through torch. What the run's own ranks
    hold of a GPU by now, such as a model that the script has put there, counts as free: plans count it themselves.
    """
    machine = probe()
    device = PlanRequest.of(variables).device
    if not machine.gpus:
        return machine if device is None else replace(machine, gpus=device.unlisted)
    ranks = _rank_processes(variables.get(RUN_DIRECTORY))
    return replace(machine, gpus=tuple(_without(gpu, ranks) for gpu in machine.gpus)) if ranks else machine


def _rank_processes(directory: str | None) -> set[int]:
    """Return the process ids that the ranks of a run directory have written down."""
    processes = set()
    for path in Path(directory).glob("rank*.pid") if directory else ():
        with suppress(OSError, ValueError):
            processes.add(int(path.read_text()))
    return processes


def _without(gpu: Gpu, ranks: set[int]) -> Gpu:
    ours = [process for process in gpu.processes or () if process.pid in ranks]
    if not ours or gpu.free_bytes is None or gpu.used_bytes is None:
        return gpu
    held = sum(process.used_bytes or 0 for process in ours)
    others = tuple(process for process in gpu.processes or () if process not in ours)
    return replace(gpu, processes=others, free_bytes=gpu.free_bytes + held, used_bytes=gpu.used_bytes - held)
