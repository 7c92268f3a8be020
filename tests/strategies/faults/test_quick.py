"""Some faults of every sort in a few runs, at moments that differ from time to time; `test_many.py` has all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.strategies.faults.suite import FAULTS, PLANS, Case, Plan, Reference, check, play, settings_of

SHORT = {"steps": 21, "pause": 0.03}


@pytest.mark.parametrize(
    "names",
    [
        ("kill -9 of a rank that saves", "kill -9 of the agent"),
        ("out of memory", "a rank sleeps"),
        ("full disk",),
    ],
    ids=lambda names: ", ".join(names),
)
@pytest.mark.slow
def test_a_run_survives(names: tuple[str, ...], tmp_path: Path, reference: Reference) -> None:
    faults = tuple(FAULTS[name] for name in names)
    plan = Plan() if faults[0].ending == "out_of_memory" else PLANS[0]
    settings = {**settings_of(faults[0], plan), **SHORT}
    seed = random.SystemRandom().randrange(10**6)
    case = Case(faults=faults, seed=seed, settings=settings, plan=plan, reference=reference(settings))
    check(*play(case, tmp_path))
