"""Steps of TRL's trainers, traced, against what the trainers themselves took and against closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.search.estimate import job_of
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from scripts.measure.trl_memory import TrlRun, job_for, read_runs
from scripts.measure.trl_traces import TrlTrace, read_traces, spread_of, traced
from strategies.tracing.step.refusal import TraceFailed
from strategies.tracing.step.step import trace_step

pytest.importorskip("trl")
pytest.importorskip("peft")

WHOLE = [run for run in read_runs() if run.backend == "torch"]
"""Runs whose step is traced as a whole on CPUs."""


def _name(run: TrlRun) -> str:
    return f"{run.trainer}-{run.strategy}"


@pytest.mark.parametrize("run", WHOLE, ids=_name)
@pytest.mark.sweep(suite=lambda run: _name(run) == "kto-ddp")
def test_a_trace_takes_what_the_trainer_took(run: TrlRun) -> None:
    assert trace_step(job_for(run)).peak_bytes == pytest.approx(run.peak_bytes, rel=0.01)


def test_closed_forms_lie_close_to_what_was_traced() -> None:
    """They are asked for models of 8 billion weights: half within 2 %, all within 6 %."""
    _, middle, worst = spread_of(read_traces())
    assert middle <= 0.02
    assert worst <= 0.06


@pytest.mark.parametrize("row", read_traces(), ids=lambda row: f"{row.trainer}-{row.strategy}-{row.model}")
@pytest.mark.slow
def test_a_trace_is_what_it_was(row: TrlTrace) -> None:
    again = traced(replace(row, **{f"{phase}_bytes": 0 for phase in row.peaks}))
    assert again.peaks == row.peaks


def job(task: Any, **work: Any) -> Job:
    request = make_request(
        find_model("gpt2"),
        resolve_cluster(HardwareRequest(gpu="H100", gpus=1)),
        WorkOptions(**{"task": task, "prompt_len": 8, "completion_len": "24", **work}),
    )
    return job_of(*exact(request, ExactOptions(micro_batch=2)))


@pytest.mark.parametrize(
    ("task", "work", "reason"),
    [
        ("orpo", {}, "TRL has no trainer of orpo among its stable ones"),
        ("ppo", {"rollout": "hf"}, "TRL has no trainer of ppo among its stable ones"),
        ("dpo", {"loss": "plain"}, "--task dpo is traced with its trainer's loss, not with --loss plain"),
    ],
)
def test_what_no_trainer_of_trl_runs_is_refused_in_one_line(task: str, work: dict[str, Any], reason: str) -> None:
    with pytest.raises(TraceFailed, match=reason):
        trace_step(job(task, **work))
