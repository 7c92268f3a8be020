"""At least twenty random moments of every fault, on real processes; `scripts/faults.sh` runs it and tells the figures.

Every run has to reach its last step, with the losses of a run to which nothing happened (exactly where the plan stays,
within 1e-6 where it changes), every sample used once per epoch, nothing left running, the cause named in the journal.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from suite import FAULTS, Case, Reference, check, play, settings_of

MOMENTS = int(os.environ.get("FAULT_MOMENTS", "24"))
"""Per kind of fault."""
RUNS = [(name, seed) for name, fault in FAULTS.items() for seed in range(math.ceil(MOMENTS / fault.per_run))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_a_run_survives(name: str, seed: int, tmp_path: Path, reference: Reference) -> None:
    fault, settings = FAULTS[name], settings_of(FAULTS[name], seed)
    faults = (fault,) * fault.per_run
    check(*play(Case(faults=faults, seed=seed, settings=settings, reference=reference(settings)), tmp_path))
