"""A configuration that ran before answers with its measurement."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.fingerprint import Versions
from hardware_db.store import MemoryStore, open_store
from planner.calibration.experience import KnownRun
from planner.search.estimate import estimate, price, time_step
from planner.search.recall import recall, recall_from
from planner.search.request import Request
from planner.types.cluster import NOTHING_MEASURED, Curve, Rates
from planner.types.plan import Configuration, Plan, StepTime
from planner.vocabulary import Strategy
from scripts.fit import one_run
from tests.planner.calibration.runs import HERE, User, on_this_machine


def _ask(store: MemoryStore, user: User) -> Request:
    return recall_from(store, user.request())


def test_the_measurement_answers_and_the_prediction_stands_beside_it() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(run)
    request = _ask(store, user)
    (configuration,) = request.experience.known_runs
    plan = estimate(request, configuration)
    assert plan.time.step_seconds == run.measured.step_seconds
    assert plan.time.predicted_step_seconds == pytest.approx(run.predicted.step_seconds)
    assert plan.provenance["step"] == "measured"
    assert plan.notes[0].startswith("step time measured here once, last on ")
    parts = (
        plan.time.compute_seconds
        + plan.time.exposed_communication_seconds
        + plan.time.offload_seconds
        + plan.time.optimizer_seconds
        + plan.time.bubble_seconds
    )
    assert parts == pytest.approx(plan.time.step_seconds)
    assert time_step(price(request, configuration)).step_seconds == plan.time.step_seconds
    assert plan.throughput.samples_per_second == pytest.approx(64 / plan.time.step_seconds)


def test_any_other_configuration_model_or_work_is_predicted() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(run)
    (configuration,) = _ask(store, user).experience.known_runs
    other = replace(configuration, activation_checkpointing="selective")
    assert estimate(_ask(store, user), other).time.predicted_step_seconds is None
    assert recall_from(store, user.request(task="causal-lm")).experience.known_runs
    assert not recall_from(store, replace(user, model="distilgpt2").request()).experience.known_runs
    elsewhere = replace(user, machine=User().machine)
    away = MemoryStore()
    away.add(elsewhere.runs(1)[0])
    assert not _ask(away, user).experience.known_runs


def test_a_plan_like_one_that_was_run_is_as_far_off_as_that() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(replace(run, measured=replace(run.measured, step_seconds=1.3 * (run.predicted.step_seconds or 0.0))))
    request, bare = _ask(store, user), user.request()
    (configuration,) = request.experience.known_runs
    alike = replace(configuration, activation_checkpointing="full")
    there, alone = estimate(request, alike), estimate(bare, alike)
    assert there.time.step_seconds == pytest.approx(1.3 * alone.time.step_seconds)
    assert there.time.step_seconds > estimate(request, configuration).time.step_seconds
    assert there.provenance["step"] == "calibrated"
    assert "the nearest runs made here took 1.30x the model's time; counted so" in there.notes


def _after(user: User, runs: dict[Strategy, float], *, rates: Rates = NOTHING_MEASURED) -> dict[Strategy, Plan]:
    """Plans of every strategy after a run of each of some, which took so many times the model's time."""
    store, request = MemoryStore(), user.request()
    for strategy, ratio in runs.items():
        run = user.run(_under(strategy), random.Random(1))
        store.add(
            replace(run, measured=replace(run.measured, step_seconds=ratio * (run.predicted.step_seconds or 0.0)))
        )
    knowing = recall_from(store, request)
    knowing = replace(knowing, cluster=replace(knowing.cluster, rates=rates))
    return {strategy: estimate(knowing, _under(strategy)) for strategy in _COMPARED}


_COMPARED: tuple[Strategy, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def _under(strategy: Strategy) -> Configuration:
    first = on_this_machine().configurations()[0]
    replicas, backend = (2, "torch") if strategy == "ddp" else (1, "torch" if strategy == "fsdp" else "native")
    return replace(first, strategy=strategy, backend=backend, dp_replicate=replicas, dp_shard=2 // replicas)  # type: ignore[arg-type]


def _ratios(after: dict[Strategy, Plan], before: dict[Strategy, Plan]) -> dict[Strategy, float]:
    return {name: plan.time.step_seconds / before[name].time.step_seconds for name, plan in after.items()}


def test_a_run_of_one_strategy_moves_another_by_the_computing_they_share() -> None:
    """A slow machine explains 1.3 times the predicted time; seven times it is the engine's own."""
    user = on_this_machine()
    bare = _after(user, {})
    slower, far, faster = (_ratios(_after(user, {"zero3": ratio}), bare) for ratio in (1.3, 7.0, 0.7))
    assert slower["zero3"] == pytest.approx(1.3)
    assert all(1.1 < slower[name] < 1.3 for name in _COMPARED[:4])
    assert far["zero3"] == pytest.approx(7.0)
    assert all(1.0 <= far[name] < slower[name] for name in _COMPARED[:4])
    assert faster["zero3"] == pytest.approx(0.7)
    assert all(faster[name] == 1.0 for name in _COMPARED[:4])


def test_where_the_machine_is_measured_another_strategy_stays_as_predicted() -> None:
    user, rates = on_this_machine(), Rates(matmul=Curve(points=((1e9, 0.01), (1e12, 10.0))))
    before, after = _after(user, {}, rates=rates), _after(user, {"zero3": 7.0}, rates=rates)
    ratios = _ratios(after, before)
    assert ratios.pop("zero3") > 2
    assert set(ratios.values()) == {1.0}


def test_a_run_that_took_what_was_predicted_says_that_computing_is_not_slower() -> None:
    user = on_this_machine()
    ratios = _ratios(_after(user, {"zero3": 7.0, "ddp": 1.0}), _after(user, {}))
    assert ratios["fsdp"] == ratios["zero1"] == pytest.approx(1.0)


def test_zero1_and_zero2_of_one_backend_are_off_alike() -> None:
    user = on_this_machine()
    after, bare = _after(user, {"zero1": 1.5}), _after(user, {})
    assert _ratios(after, bare)["zero2"] == pytest.approx(1.5)
    assert "the nearest runs made here took 1.50x the model's time; counted so" in after["zero2"].notes
    (note,) = [note for note in after["fsdp"].notes if "other strategies" in note]
    assert note.startswith("runs of other strategies made here say that computing takes 1.")
    assert after["fsdp"].provenance["step"] == "calibrated"


def test_one_run_predicts_other_strategies_better_by_what_they_share_than_by_all_it_took() -> None:
    for machine, bench in one_run.machines().items():
        errors_of_pairs = [pair.errors for pair in one_run.pairs(bench)]
        mean = {
            counted: statistics.fmean(errors[counted] for errors in errors_of_pairs) for counted in errors_of_pairs[0]
        }
        assert mean["what is shared"] < mean["whole ratio"], machine
        assert mean["what is shared"] < mean["nothing"], machine


def test_several_runs_answer_with_their_median_and_a_narrower_interval() -> None:
    user = on_this_machine(noise=0.01)
    configuration = user.configurations()[0]
    chance = random.Random(3)
    widths = []
    store = MemoryStore()
    for count in (1, 3, 8):
        while store.count() < count:
            store.add(user.run(configuration, chance))
        time = estimate(_ask(store, user), configuration).time
        seconds = sorted(stored.measured.step_seconds or 0.0 for stored in store.list())
        assert time.step_seconds == pytest.approx(seconds[len(seconds) // 2], rel=0.02)
        assert time.step_seconds_low is not None
        assert time.step_seconds_high is not None
        assert time.step_seconds_low < time.step_seconds < time.step_seconds_high
        widths.append(time.step_seconds_high / time.step_seconds_low)
    assert widths[0] > widths[1] > widths[2]


def test_runs_of_the_newest_versions_and_completed_ones_count() -> None:
    user = on_this_machine(noise=0.0)
    (run,) = user.runs(1)
    newer = replace(run.fingerprint, versions=Versions(torch="2.10.0"))
    faster = replace(run.measured, step_seconds=(run.measured.step_seconds or 0) / 2)
    again = replace(run, id="a" * 32, created_at="2099-01-01T00:00:00.000000Z", fingerprint=newer, measured=faster)
    failed = replace(run, id="b" * 32, created_at="2099-01-02T00:00:00.000000Z", outcome="failed")
    store = MemoryStore()
    store.add(run, again, failed)
    (newest,) = _ask(store, user).experience.known_runs.values()
    assert newest.each == (faster.step_seconds,)


def test_a_run_under_another_name_of_the_model_is_found() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(replace(run, plan_json=run.plan_json.replace("openai-community/gpt2", "./my-gpt2")))
    assert _ask(store, user).experience.known_runs


def test_without_a_database_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    request = on_this_machine().request()
    assert recall(request) is request
    assert not (tmp_path / "home").exists()


def test_the_users_database_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    user = on_this_machine()
    with open_store() as store:
        store.add(*user.runs(1))
    assert len(recall(user.request()).experience.known_runs) == 1


def test_a_measured_time_scales_every_part() -> None:
    time = StepTime(
        step_seconds=4.0,
        compute_seconds=2.0,
        communication_seconds=3.0,
        exposed_communication_seconds=1.0,
        offload_seconds=0.0,
        optimizer_seconds=0.5,
        bubble_seconds=0.5,
    )
    user = on_this_machine(noise=0.0)
    store = MemoryStore()
    store.add(user.runs(1)[0])
    (run,) = _ask(store, user).experience.known_runs.values()
    answer = replace(run, step_seconds=8.0, each=(8.0,)).answer(time)
    assert (answer.compute_seconds, answer.communication_seconds, answer.bubble_seconds) == (4.0, 6.0, 1.0)
    assert (answer.step_seconds, answer.predicted_step_seconds) == (8.0, 4.0)
    assert HERE.usable_gpus == ()


@pytest.mark.parametrize(
    ("predicted", "alone"), [(0.29, "71% too little"), (1.5, "50% too much"), (1.001, "the same"), (0.999, "the same")]
)
def test_a_known_run_says_by_how_much_the_model_alone_is_off(predicted: float, alone: str) -> None:
    run = KnownRun(step_seconds=1.0, each=(1.0,), created_at="2026-11-28T10:00:00Z")
    assert run.sentence(predicted).endswith(f"last on 2026-11-28; the model alone predicts {alone}")
