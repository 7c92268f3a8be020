"""Decisions of tuning from measured steps, and a run that changes its plan for it."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hardware_db.probe import probe
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.models.resolve import resolve_model
from planner.search.estimate import estimate
from planner.search.request import Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import load_plan, plan_from_dict, plan_to_dict, save_plan
from strategies.autoplan import tuning
from strategies.run_directory.resume_state import Tried, Tuning
from strategies.tracing.live import facts_from_module
from tests.strategies.launch.command import run

START_SECONDS = 20.0


@cache
def _request() -> Request:
    cluster = resolve_cluster(HardwareRequest(gpus=4, gpu="A100-SXM4-80GB"))
    options = WorkOptions(seq_len=512, global_batch=32, precision="bf16")
    return make_request(resolve_model("openai-community/gpt2"), cluster, options)


@cache
def _plans() -> tuple[Plan, ...]:
    """Fastest first."""
    return recommend(replace(_request(), simplest_first=False)).plans


def _decided(plan: Plan, seconds: float, before: Tuning | None = None, **changes: Any) -> tuning.Decision:
    start = changes.get("start_seconds", START_SECONDS)
    return tuning.decide(plan, seconds, before or Tuning(), _request(), start)


def _following(decision: tuning.Decision) -> Plan:
    assert decision.tuning.following is not None
    return plan_from_dict(decision.tuning.following)


def test_the_fastest_plan_stays_however_long_its_steps_took() -> None:
    fastest = _plans()[0]
    for factor in (0.5, 1.0, 3.0):
        decision = _decided(fastest, factor * fastest.time.step_seconds)
        assert (decision.switches, decision.tuning.is_over, decision.why) == (False, True, None)
        assert _following(decision).configuration == fastest.configuration


def _slow_plan() -> Plan:
    """A plan that is predicted to take half as long again as the best."""
    from planner.search.evaluate import Candidate
    from planner.search.space import enumerate_candidates

    request, best = _request(), _plans()[0].time.step_seconds
    for layout in enumerate_candidates(request):
        timed = Candidate(request, layout).timed(0)
        if layout.strategy == "ddp" and layout.tp == layout.pp == 1 and timed.time.step_seconds > 1.5 * best:
            return timed.plan
    raise AssertionError("none is so slow")


def test_a_slow_plan_gives_way_to_one_that_is_predicted_faster_with_what_was_measured() -> None:
    slow = _slow_plan()
    measured = 1.2 * slow.time.step_seconds
    decision = _decided(slow, measured)
    assert decision.switches
    assert not decision.tuning.is_over
    assert decision.tuning.switches == 1
    assert decision.tuning.tried == (Tried(plan=plan_to_dict(slow), step_seconds=measured),)
    offered = _following(decision)
    assert offered.time.step_seconds < 0.9 * measured
    assert offered.configuration.global_batch_size == 32
    assert "is predicted to take" in decision.why


def test_a_change_that_does_not_pay_for_the_restart_is_not_made() -> None:
    slow = _slow_plan()
    decision = _decided(slow, slow.time.step_seconds, start_seconds=tuning.PAYS_BACK_SECONDS)
    assert (decision.switches, decision.tuning.is_over) == (False, True)


def test_a_plan_that_measured_slower_goes_back_and_nothing_is_tried_after() -> None:
    first, second = _plans()[:2]
    took = first.time.step_seconds
    before = Tuning(tried=(Tried(plan=plan_to_dict(first), step_seconds=took),), switches=1)
    decision = _decided(second, 1.5 * took, before)
    assert (decision.switches, decision.tuning.is_over, decision.tuning.switches) == (True, True, 2)
    assert _following(decision).configuration == first.configuration
    assert " took " in decision.why
    close = _decided(second, 1.02 * took, before)
    assert not close.switches


def test_after_a_few_changes_what_runs_stays() -> None:
    slow = _slow_plan()
    decision = _decided(slow, slow.time.step_seconds, Tuning(switches=tuning.MOST_SWITCHES))
    assert (decision.switches, decision.tuning.is_over) == (False, True)


def test_a_plan_measured_again_counts_with_its_newest_time() -> None:
    fastest = _plans()[0]
    before = Tuning(tried=(Tried(plan=plan_to_dict(fastest), step_seconds=9.0),))
    (tried,) = _decided(fastest, 1.0, before).tuning.tried
    assert tried.step_seconds == pytest.approx(1.0)


TRAIN = """
import dsplan, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 64)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))

if __name__ == "__main__":
    engine, _, loader, _ = dsplan.initialize(model=Net(), training_data=Data(), config={"train_batch_size": 32})
    while engine.global_steps < 200:  # a fast machine measures up to 160
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
"""


@pytest.mark.slow
def test_a_run_leaves_a_slow_plan_and_keeps_its_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    save_plan(_sixteen_micro_batches(script), tmp_path / "slow.yaml")
    folder = tmp_path / "run"
    finished = run("--json", "--tune", "--plan", tmp_path / "slow.yaml", "--run-dir", folder, script, cwd=tmp_path)
    assert finished.status == 0, finished.err
    first, *others = finished.json["attempts"]
    assert first["ending"]["kind"] == "switch"
    assert others
    assert finished.json["measured"]["steps"] == 200
    used = load_plan(folder / "plan.yaml").configuration
    assert used.global_batch_size == 32
    assert used.micro_batch_size > 1
    tuned = Tuning.load(folder)
    assert tuned is not None
    assert tuned.tried[0].plan["plan"]["micro_batch_size"] == 1
    assert "is predicted to take" in (folder / "rank0.stdout.log").read_text()


def _sixteen_micro_batches(script: Path) -> Plan:
    """A plan that takes sixteen times as many micro-batches as it needs, and computes each twice."""
    scope = runpy.run_path(str(script))
    options = WorkOptions(seq_len=16, global_batch=32, precision="fp32")
    request = make_request(facts_from_module(scope["Net"]()), probed_cluster(probe(), ranks=2), options)
    configuration = Configuration(
        strategy="ddp",
        backend="torch",
        dp_replicate=2,
        micro_batch_size=1,
        gradient_accumulation_steps=16,
        global_batch_size=32,
        sequence_length=16,
        precision="fp32",
        optimizer="adamw",
        activation_checkpointing="full",
    )
    return estimate(request, configuration)
