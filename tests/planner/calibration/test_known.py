"""A configuration that ran before answers with its measurement."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.fingerprint import Versions
from hardware_db.store import MemoryStore, open_store
from planner.search.estimate import estimate, price, timed
from planner.search.recall import recalled, recalled_from
from planner.search.request import Request
from planner.types.plan import StepTime
from planner.vocabulary import Strategy
from tests.planner.calibration.runs import HERE, User, on_this_machine


def _asked(store: MemoryStore, user: User) -> Request:
    return recalled_from(store, user.request())


def test_the_measurement_answers_and_the_prediction_stands_beside_it() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(run)
    request = _asked(store, user)
    (configuration,) = request.experience.known
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
    assert timed(price(request, configuration)).step_seconds == plan.time.step_seconds
    assert plan.throughput.samples_per_second == pytest.approx(64 / plan.time.step_seconds)


def test_any_other_configuration_model_or_work_is_predicted() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(run)
    (configuration,) = _asked(store, user).experience.known
    other = replace(configuration, activation_checkpointing="selective")
    assert estimate(_asked(store, user), other).time.predicted_step_seconds is None
    assert recalled_from(store, user.request(task="causal-lm")).experience.known
    assert not recalled_from(store, replace(user, model="distilgpt2").request()).experience.known
    elsewhere = replace(user, machine=User().machine)
    away = MemoryStore()
    away.add(elsewhere.runs(1)[0])
    assert not _asked(away, user).experience.known


def test_a_plan_like_one_that_was_run_is_as_far_off_as_that() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(replace(run, measured=replace(run.measured, step_seconds=1.3 * (run.predicted.step_seconds or 0.0))))
    request, bare = _asked(store, user), user.request()
    (configuration,) = request.experience.known
    alike = replace(configuration, activation_checkpointing="full")
    there, alone = estimate(request, alike), estimate(bare, alike)
    assert there.time.step_seconds == pytest.approx(1.3 * alone.time.step_seconds)
    assert there.time.step_seconds > estimate(request, configuration).time.step_seconds
    assert there.provenance["step"] == "calibrated"
    assert "the nearest runs made here took 1.30x the model's time; counted so" in there.notes


@pytest.mark.parametrize(("ratio", "expected"), [(1.3, 1.3), (0.7, 1.0)])
def test_another_strategy_is_not_held_faster_for_it(ratio: float, expected: float) -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(replace(run, measured=replace(run.measured, step_seconds=ratio * (run.predicted.step_seconds or 0.0))))
    request, bare = _asked(store, user), user.request()
    (configuration,) = request.experience.known
    strategy: Strategy = "fsdp" if configuration.strategy == "ddp" else "ddp"
    world = configuration.world_size
    sharded = world if strategy == "fsdp" else 1
    other = replace(configuration, strategy=strategy, backend="torch", dp_shard=sharded, dp_replicate=world // sharded)
    there, alone = estimate(request, other).time.step_seconds, estimate(bare, other).time.step_seconds
    assert there == pytest.approx(expected * alone)


def test_several_runs_answer_with_their_median_and_a_narrower_interval() -> None:
    user = on_this_machine(noise=0.01)
    configuration = user.configurations()[0]
    chance = random.Random(3)
    widths = []
    store = MemoryStore()
    for count in (1, 3, 8):
        while store.count() < count:
            store.add(user.run(configuration, chance))
        time = estimate(_asked(store, user), configuration).time
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
    (known,) = _asked(store, user).experience.known.values()
    assert known.each == (faster.step_seconds,)


def test_a_run_under_another_name_of_the_model_is_found() -> None:
    user = on_this_machine()
    (run,) = user.runs(1)
    store = MemoryStore()
    store.add(replace(run, plan_json=run.plan_json.replace("openai-community/gpt2", "./my-gpt2")))
    assert _asked(store, user).experience.known


def test_without_a_database_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    request = on_this_machine().request()
    assert recalled(request) is request
    assert not (tmp_path / "home").exists()


def test_the_users_database_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    user = on_this_machine()
    with open_store() as store:
        store.add(*user.runs(1))
    assert len(recalled(user.request()).experience.known) == 1


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
    (known,) = _asked(store, user).experience.known.values()
    answer = replace(known, step_seconds=8.0, each=(8.0,)).answer(time)
    assert (answer.compute_seconds, answer.communication_seconds, answer.bubble_seconds) == (4.0, 6.0, 1.0)
    assert (answer.step_seconds, answer.predicted_step_seconds) == (8.0, 4.0)
    assert HERE.usable_gpus == ()
