"""The runs that the faults are compared with."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.faults.ledger import Step
from tests.strategies.faults.suite import Reference, uninterrupted


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Reference:
    """The steps of a run with some settings to which nothing happens; trained once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def steps(settings: Mapping[str, Any]) -> list[Step]:
        quick = {**settings, "pause": 0}  # waiting changes no loss
        path = shared / f"reference-{sha256(repr(sorted(quick.items())).encode()).hexdigest()[:16]}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                trained = uninterrupted(tmp_path_factory.mktemp("uninterrupted"), quick, ranks)
                path.write_text(json.dumps([asdict(step) for step in trained]))
        return [Step(**{**row, "samples": tuple(row["samples"])}) for row in json.loads(path.read_text())]

    return steps
