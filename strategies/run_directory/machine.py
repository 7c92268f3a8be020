"""The machine that a run has: what the drivers list, or where they list no GPU, what the command saw. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from hardware_db.probe import Machine, probe
from strategies.run_directory.request import PlanRequest


def own_machine(variables: Mapping[str, str] = os.environ) -> Machine:
    """Return this machine, with the GPUs that `dsplan run` saw through torch where no driver's library lists any.

    `variables` are those of a rank, or of a launch.
    """
    machine = probe()
    device = PlanRequest.of(variables).device
    return machine if machine.gpus or device is None else replace(machine, gpus=device.unlisted)
