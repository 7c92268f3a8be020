"""Nodes are lost and come while a run continues: it keeps those that are there, and its losses stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.strategies.launchers import namespaces
from tests.strategies.launchers.launched import launched

# Divisible by every number of ranks there will be; long enough to lose and to find nodes in it.
VARIABLES = {"STEPS": "200", "BATCH": "24", "STRATEGY": "", "PAUSE": "0.5"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_nodes_then_two_then_three(tmp_path: Path) -> None:
    if reason := namespaces.missing():
        pytest.skip(reason)
    with launched(tmp_path / "alone", {**VARIABLES, "PAUSE": "0"}) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        reference = run.losses()
    with namespaces.namespaces(5) as nodes, launched(tmp_path / "nodes", VARIABLES) as run:
        options = ("--nproc", "1", "--nodes", "1:4", "--rendezvous", f"{namespaces.address(0)}:29400")
        options += ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-steps", "3")
        started = [
            run.start(*options, before=nodes[number], run_directory=tmp_path / f"node{number}") for number in range(4)
        ]
        run.until_step_on(4, ranks=4)
        for lost in started[2:]:
            lost.kill()
        run.until_step_on(4, ranks=2)
        started[2:] = [run.start(*options, before=nodes[4], run_directory=tmp_path / "node4")]
        run.until_step_on(4, ranks=3)
        run.hurry()
        assert [run.wait(process) for process in started] == [0, 0, 0], run.out
        assert run.losses() == pytest.approx(reference, rel=1e-4)
    journal = [json.loads(line) for line in (tmp_path / "node0" / "run.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in journal if row["event"] == "ending"]
    assert {"lost", "regrouped"} <= set(kinds), kinds
