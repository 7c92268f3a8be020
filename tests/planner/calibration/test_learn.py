"""Learning from stored runs: the next predictions improve, the interval narrows, and nothing that is worse is kept."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace

import pytest

from dsplan.diagnostics.recorded_runs import describe_improvement
from hardware_db.files import canonical_json
from hardware_db.fingerprint import Versions
from hardware_db.measurement import Measurement, calibration_record
from hardware_db.store import MemoryStore
from planner.calibration.calibration import Calibration, hardware_kind
from planner.calibration.learn import FEWEST, Rebuilder, learn, refresh
from planner.models.resolve import resolve_model
from planner.search.estimate import estimate, time_step
from planner.search.estimate import price as priced
from planner.search.recall import recall_from
from planner.search.request import Request
from planner.types.cluster import SHIPPED, Factors
from planner.types.job import counts_of
from planner.types.plan_io import configuration_from_dict
from tests.planner.calibration.runs import HERE, User, on_this_machine, predicted


def _store(*runs: Measurement) -> MemoryStore:
    store = MemoryStore()
    store.add(*runs)
    return store


def _errors(request: Request, runs: list[Measurement]) -> list[float]:
    rows = []
    for run in runs:
        seconds = predicted(request, configuration_from_dict(run.plan["plan"]))
        rows.append(abs(seconds / (run.measured.step_seconds or math.nan) - 1))
    return rows


@pytest.mark.parametrize("user", [User(), User(model="meta-llama/Llama-3.2-1B", noise=0.04), on_this_machine()])
@pytest.mark.sweep(every=2)
def test_after_ten_runs_the_error_on_the_next_ten_is_at_most_half(user: User) -> None:
    runs = user.runs(20)
    store = _store(*runs[:10])
    before = user.request()
    (calibrated,) = refresh(store, HERE).kinds
    assert calibrated.is_new
    after = recall_from(store, before)
    assert after.cluster.factors != SHIPPED
    assert statistics.median(_errors(after, runs[10:])) <= statistics.median(_errors(before, runs[10:])) / 2


@pytest.mark.slow
def test_every_run_brings_the_prediction_nearer_on_average() -> None:
    user = User()
    runs = user.runs(24)
    medians = []
    for count in (0, 4, 12):
        store = _store(*runs[:count])
        refresh(store, HERE)
        medians.append(statistics.median(_errors(recall_from(store, user.request()), runs[12:])))
    assert medians[0] > medians[1] > medians[2]


def test_the_interval_narrows_with_runs_and_still_holds_them() -> None:
    user = User()
    runs = user.runs(32)
    widths, inside = [], []
    for count in (0, 5, 20):
        store = _store(*runs[:count])
        refresh(store, HERE)
        request = recall_from(store, user.request())
        plan = estimate(request, configuration_from_dict(runs[-1].plan["plan"]))
        assert plan.time.step_seconds_low is not None
        assert plan.time.step_seconds_high is not None
        widths.append(math.log(plan.time.step_seconds_high / plan.time.step_seconds_low))
        if count == 20:
            for run in runs[20:]:
                time = estimate(request, configuration_from_dict(run.plan["plan"])).time
                low, high = time.step_seconds_low or 0.0, time.step_seconds_high or 0.0
                inside.append(low <= (run.measured.step_seconds or 0.0) <= high)
    assert widths[0] > widths[1] > widths[2]
    assert sum(inside) >= 0.85 * len(inside)


def test_a_user_whose_hardware_is_as_shipped_is_told_nothing_wrong() -> None:
    user = User(truth=SHIPPED, noise=0.03)
    before, after = [], []
    for seed in range(4):
        runs = user.runs(20, seed)
        store = _store(*runs[:10])
        refresh(store, HERE)
        before.append(statistics.median(_errors(user.request(), runs[10:])))
        after.append(statistics.median(_errors(recall_from(store, user.request()), runs[10:])))
    assert statistics.mean(after) <= 1.3 * statistics.mean(before)


def test_what_does_not_help_runs_left_out_is_refused() -> None:
    chance = random.Random(2)
    user = User(truth=SHIPPED, noise=0.0)
    wild = [
        replace(run, measured=replace(run.measured, step_seconds=(run.measured.step_seconds or 0) * factor))
        for run, factor in zip(user.runs(8), [1.0, 1.0, 1.0, 1.0, 1.0, 1.9, 2.1, 0.4], strict=True)
    ]
    chance.shuffle(wild)
    store = _store(*wild)
    (calibrated,) = refresh(store, HERE).kinds
    lesson = calibrated.lesson
    assert lesson.calibration is None
    assert "no better than shipped" in lesson.reason
    assert lesson.error_after is not None
    assert lesson.error_before is not None
    assert lesson.error_after > lesson.error_before
    assert store.calibrations() == ()


def test_a_calibration_that_new_runs_prove_wrong_is_withdrawn() -> None:
    user = User(truth=SHIPPED, noise=0.0)
    rows = user.runs(8)
    store = _store(*rows)
    kind = hardware_kind(user.request().cluster)
    wrong = Calibration(
        factors=Factors(compute=3.0),
        names=("compute",),
        covariance=((0.01,),),
        spread=1.0,
        rows=5,
        models=("x",),
        error_before=0.5,
        error_after=0.1,
    )
    store.add_calibration(
        replace(calibration_record(kind, wrong.as_document()), created_at="2020-01-01T00:00:00.000000Z")
    )
    assert recall_from(store, user.request()).cluster.factors == wrong.factors
    (calibrated,) = refresh(store, HERE).kinds
    assert calibrated.is_new
    assert recall_from(store, user.request()).cluster.factors.compute == pytest.approx(1.0, abs=0.05)


def test_fewer_configurations_than_needed_store_nothing_and_say_so() -> None:
    user = User()
    run = user.runs(1)[0]
    again = [replace(run, id=f"{number:032x}") for number in range(5)]
    store = _store(*again)
    (calibrated,) = refresh(store, HERE).kinds
    assert calibrated.lesson.reason == f"1 different configurations ran, and {FEWEST} are needed"
    assert not calibrated.is_new
    assert store.calibrations() == ()


@pytest.mark.slow
def test_a_dry_run_stores_nothing_and_a_second_run_nothing_new() -> None:
    store = _store(*User().runs(10))
    assert refresh(store, HERE, keep=False).kinds[0].is_new
    assert store.calibrations() == ()
    assert refresh(store, HERE).kinds[0].is_new
    assert not refresh(store, HERE).kinds[0].is_new
    assert len(store.calibrations()) == 1


@pytest.mark.slow
def test_each_kind_of_hardware_learns_from_its_own_runs() -> None:
    here = on_this_machine(truth=Factors(compute=0.5))
    store = _store(*User().runs(10), *here.runs(10))
    kinds = {kind.hardware.device: kind.lesson for kind in refresh(store, HERE).kinds}
    assert set(kinds) == {"A100-SXM4-80GB", "Testing CPU"}
    slow, slower = (recall_from(store, user.request()).cluster.factors.compute for user in (User(), here))
    assert slower < slow < 0.9


def test_only_completed_runs_teach_and_lost_models_are_counted() -> None:
    user = User()
    runs = user.runs(6)
    failed = [replace(run, outcome="failed") for run in user.runs(3, seed=9)]
    nameless = replace(
        runs[0], id="f" * 32, plan_json=runs[0].plan_json.replace("facebook/opt-1.3b", "someone/lost-model")
    )
    refreshed = refresh(_store(*runs, *failed, nameless), HERE)
    assert refreshed.skipped == 1
    assert refreshed.kinds[0].lesson.rows == 6


def _with_adapters(run: Measurement, targets: str) -> Measurement:
    plan = json.loads(run.plan_json)
    plan["workload"] |= {"method": "lora", "lora_targets": targets}
    return replace(run, plan_json=canonical_json(plan))


def test_a_run_of_adapters_in_a_users_own_module_is_priced_again() -> None:
    facts = resolve_model("facebook/opt-1.3b")
    counts = counts_of(facts, replace(User().request().workload, method="lora"))
    adapted = replace(counts, blocks=tuple(replace(block, names=(), adapters=()) for block in counts.blocks))
    user = User(model=replace(facts, name="own", measured_counts=adapted))
    runs = [_with_adapters(run, "all-linear") for run in user.runs(3)]
    assert [row.job.counts for row in Rebuilder(MemoryStore(), HERE).rows(runs)] == [adapted] * 3


def test_a_run_whose_adapters_lie_beside_nothing_known_is_left_out() -> None:
    run, *others = User().runs(4)
    refreshed = refresh(_store(_with_adapters(run, "no_such_layer"), *others), HERE)
    assert refreshed.skipped == 1
    assert refreshed.kinds[0].lesson.rows == 3


@pytest.mark.slow
def test_runs_of_other_versions_say_less() -> None:
    truth = Factors(compute=0.7)
    user = User(truth=truth, noise=0.0)
    newest, *older = user.runs(12)
    other = replace(newest.fingerprint, versions=Versions(torch="2.1.0"))
    stale = [replace(run, fingerprint=other, created_at="2025-01-01T00:00:00.000000Z") for run in older]
    factors = []
    for runs in ((newest, *older), (newest, *stale)):
        store = _store(*runs)
        refresh(store, HERE)
        factors.append(recall_from(store, user.request()).cluster.factors.compute)
    assert truth.compute < factors[0] < factors[1] < 1


def test_a_model_outside_the_catalogue_is_priced_again_from_its_plan() -> None:
    own = replace(resolve_model("facebook/opt-1.3b"), name="our-model", num_layers=11)
    user = User(model=own)
    runs = user.runs(4)
    rows = Rebuilder(MemoryStore(), HERE).rows(runs)
    assert [row.job.facts.num_layers for row in rows] == [11] * 4
    for run, row in zip(runs, rows, strict=True):
        again = time_step(priced(user.request(), row.job.configuration)).step_seconds
        assert again == pytest.approx(run.predicted.step_seconds)


def test_models_are_left_out_whole_where_there_are_several() -> None:
    users = [User(model=name) for name in ("facebook/opt-1.3b", "facebook/opt-350m", "gpt2-xl", "facebook/opt-2.7b")]
    rows = [row for user in users for row in Rebuilder(MemoryStore(), HERE).rows(user.runs(4))]
    lesson = learn(rows)
    assert lesson.split == "each model left out in turn"
    assert lesson.calibration is not None
    assert len(lesson.calibration.models) == 4


def test_a_calibration_survives_the_database_and_one_of_other_factors_does_not() -> None:
    store = _store(*User().runs(8))
    refresh(store, HERE)
    (record,) = store.calibrations()
    calibration = Calibration.from_document(record.document, record.created_at)
    assert calibration is not None
    assert canonical_json(calibration.as_document()) == record.document_json
    assert calibration.factors.compute < 1
    for broken in ({"withdrawn": "x"}, {**record.document, "factors": {"warp": 2.0}}, {**record.document, "names": []}):
        assert Calibration.from_document(broken, "") is None


def test_what_was_learnt_is_said_where_the_figure_changes_and_as_a_factor_where_it_is_large() -> None:
    (calibrated,) = refresh(_store(*User().runs(10)), HERE).kinds
    lesson = calibrated.lesson
    assert re.fullmatch(
        r"; predicted step times are now within \d+% instead of within \d+% \(median over 10 runs, each left out .*\)",
        describe_improvement(calibrated),
    )
    far = tuple(row.seconds / 33.3 for row in calibrated.rows)
    near = tuple(row.seconds / 12.1 for row in calibrated.rows)
    wild = replace(lesson, error_before=0.97, error_after=0.92, shipped=far, left_out=near)
    assert "times are now off by 12x instead of off by 33x (" in describe_improvement(replace(calibrated, lesson=wild))
    unchanged = replace(lesson, error_after=lesson.error_before, left_out=lesson.shipped)
    for same in (replace(calibrated, lesson=unchanged), replace(calibrated, last_error=lesson.error_after)):
        assert describe_improvement(same) == ""
