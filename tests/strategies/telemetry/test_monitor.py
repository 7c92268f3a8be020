"""The metrics that a run leaves behind, as `dsplan run` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.types.plan_io import save_plan
from strategies.run_directory.files import metrics_path
from strategies.run_directory.request import PlanRequest
from strategies.telemetry.metrics import lineage, read_metrics, summarise
from strategies.telemetry.monitor import RunMonitor
from strategies.variables import REQUEST
from tests.strategies import training_bodies
from tests.strategies.attempts import attempt_options
from tests.strategies.training_bodies import Recipe

STEP_KEYS = {
    "event",
    "step",
    "global_step",
    "loss",
    "seconds",
    "load_seconds",
    "ready_seconds",
    "samples",
    "tokens",
    "allocated_bytes",
    "reserved_bytes",
    "peak_bytes",
    "rss_bytes",
    "private_bytes",
    "measured_by",
}


def test_a_run_writes_steps_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(accumulation=3)
    save_plan(recipe.plan(), tmp_path / "plan.yaml")
    monkeypatch.setenv("DSPLAN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(REQUEST, PlanRequest(plan_file=str(tmp_path / "plan.yaml")).to_variables()[REQUEST])
    engine = training_bodies.make_engine(recipe)
    losses = [training_bodies.one_step(engine, step) for step in range(5)]
    engine.close()
    (rows,) = read_metrics(tmp_path, 1)
    assert [line["event"] for line in rows] == ["step"] * 5 + ["end"], "a given plan is not written again"
    assert all(set(line) == STEP_KEYS for line in rows[:5])
    assert [line["loss"] for line in rows[:5]] == pytest.approx(losses)
    assert {(line["samples"], line["tokens"]) for line in rows[:5]} == {(12, 72)}
    assert [line["measured_by"] for line in rows[:5]] == [None, None, "storage-tracker", None, None]
    assert rows[2]["peak_bytes"] > rows[2]["allocated_bytes"] > 0
    assert rows[5]["peak_allocated_bytes"] == rows[2]["peak_bytes"]
    assert rows[5]["step_seconds"] > 0
    assert all(0 < line["load_seconds"] < line["ready_seconds"] < line["seconds"] for line in rows[:5])
    assert all(line["rss_bytes"] > 10 * 2**20 for line in rows[:5])


def test_evaluation_is_not_a_step(tmp_path: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    monitor = RunMonitor(tmp_path, rank=0, device=torch.device("cpu"), sequence_length=6)
    engine.observers.append(monitor)
    training_bodies.one_step(engine, 0)
    engine.eval()
    with torch.no_grad():
        engine(*training_bodies.batch_of(0))
    engine.train()
    training_bodies.one_step(engine, 1)
    monitor.close()
    assert [line.get("samples") for line in read_metrics(tmp_path, 1)[0]] == [12, 12, None]


def test_an_attempt_continues_in_the_file_and_counts_steps_over_all_of_them(tmp_path: Path) -> None:
    attempt_options(checkpoint_directory="checkpoints").save(tmp_path)
    _monitored(tmp_path, steps=4)
    # Killed in the middle of a line, and before any later attempt wrote its summary.
    path = metrics_path(tmp_path, 0)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + '\n{"event": "st')
    attempt_options(attempt=1, resumes=True, checkpoint_directory="checkpoints").save(tmp_path)
    _monitored(tmp_path, steps=3, after=2)
    (rows,) = read_metrics(tmp_path, 1)
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["attempt"] for row in rows if row["event"] == "attempt"] == [0, 1]
    assert [(row["step"], row["global_step"]) for row in steps] == [
        *((step, step + 1) for step in range(4)),
        *((step, step + 3) for step in range(3)),
    ]
    assert [row["global_step"] for row in lineage(rows)] == [1, 2, 3, 4, 5]
    assert rows[-1]["event"] == "end"
    assert (rows[-1]["steps"], summarise([rows]).steps) == (3, 5)


def test_without_orders_a_run_begins_its_file_anew(tmp_path: Path) -> None:
    _monitored(tmp_path, steps=2)
    _monitored(tmp_path, steps=1)
    assert [row["event"] for row in read_metrics(tmp_path, 1)[0]] == ["step", "end"]


def _monitored(directory: Path, *, steps: int, after: int = 0) -> None:
    """A process that trains `steps` steps of a run that had `after` of them when it resumed."""
    engine = training_bodies.make_engine(Recipe())
    monitor = RunMonitor(
        directory,
        rank=0,
        device=torch.device("cpu"),
        sequence_length=6,
    )
    engine.observers.append(monitor)
    monitor.training_starts(lambda: after + engine.global_steps)
    for step in range(steps):
        training_bodies.one_step(engine, step)
    engine.close()
