"""At least twenty random moments of every fault, on real processes; `scripts/faults.sh` runs it and tells the figures.

Every run has to reach its last step, with the losses of a run to which nothing happened (exactly where the plan stays,
within 1e-6 where it changes), every sample used once per epoch, nothing left running, the cause named in the journal.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from suite import FAULTS, Case, Reference, check, play, settings_of

PER_RUN = 3
RUNS = int(os.environ.get("FAULT_RUNS", "7"))
"""Per kind of fault: 7 runs with 3 moments each. More moments than that are others: the run's number is the seed."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(name: str, seed: int, tmp_path: Path, reference: Reference) -> None:
    settings = settings_of(FAULTS[name], seed)
    case = Case(faults=(FAULTS[name],) * PER_RUN, seed=seed, settings=settings, reference=reference(settings))
    check(*play(case, tmp_path))
