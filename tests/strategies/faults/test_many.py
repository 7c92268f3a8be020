"""Every kind of fault under every strategy, on real processes, all over the run; `scripts/ci/faults.sh` runs it and
tells the figures.

Every run has to reach its last step, with the losses of a run to which nothing happened (exactly where the plan stays,
within 1e-6 where it changes), every sample used once per epoch, nothing left running, the cause named in the journal,
and half of its faults after the third checkpoint.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.strategies.faults.suite import FAULTS, Case, Fault, Plan, Reference, check, play, settings_of

MOMENTS = int(os.environ.get("FAULT_MOMENTS", "24"))
"""Faults of a kind at least; one run of a kind under each of its plans at least."""


def _seeds(fault: Fault) -> range:
    return range(max(1, math.ceil(MOMENTS / (fault.per_run * len(fault.plans)))))


RUNS = [
    pytest.param(fault, plan, seed, id=f"{fault.name}-{plan.name}-{seed}")
    for fault in FAULTS.values()
    for seed in _seeds(fault)
    for plan in fault.plans
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "plan", "seed"), RUNS)
def test_a_run_survives(fault: Fault, plan: Plan, seed: int, tmp_path: Path, reference: Reference) -> None:
    settings, faults = settings_of(fault, plan), (fault,) * fault.per_run
    case = Case(faults=faults, seed=seed, settings=settings, plan=plan, reference=reference(settings))
    check(*play(case, tmp_path))
