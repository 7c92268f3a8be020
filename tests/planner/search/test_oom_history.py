"""A plan that ran out of memory here is not proposed again, nor is one that is predicted to take as much."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hardware_db.measurement import Measurement, Outcome
from hardware_db.store import MemoryStore
from planner.calibration.oom_history import OomRecord
from planner.search.estimate import estimate, price
from planner.search.recall import oom_records, recall_from
from planner.search.request import Request
from planner.search.search import recommend
from planner.types.plan import Configuration
from tests.planner.calibration.runs import User, on_this_machine

USER = on_this_machine(noise=0.0)


def _run(configuration: Configuration, outcome: Outcome, number: int, day: int = 1, user: User = USER) -> Measurement:
    measurement = user.run(configuration, random.Random(1), outcome)
    return replace(measurement, id=f"{number:032x}", created_at=f"2026-05-{day:02}T00:00:00.000000Z")


def _ask(*runs: Measurement, **options: Any) -> Request:
    store = MemoryStore()
    store.add(*runs)
    return recall_from(store, USER.request(**options))


def _proposed(request: Request) -> list[Configuration]:
    return [plan.configuration for plan in recommend(replace(request, top=20)).plans]


def _peak(configuration: Configuration) -> int:
    return price(USER.request(), configuration).memory.peak_allocated_bytes


BY_PEAK = sorted(USER.configurations(), key=_peak)
FIRST = _proposed(USER.request())[0]
FAILED, LARGER, SMALLER = BY_PEAK[len(BY_PEAK) // 2], BY_PEAK[-1], BY_PEAK[0]


def test_the_failed_plan_and_all_that_take_as_much_are_out() -> None:
    request = _ask(_run(FIRST, "out_of_memory", 7))
    proposed = _proposed(request)
    assert proposed
    assert FIRST not in proposed
    assert all(_peak(configuration) < _peak(FIRST) for configuration in proposed)
    request = _ask(_run(FAILED, "out_of_memory", 7))
    assert [estimate(request, configuration).verdict for configuration in (SMALLER, FAILED, LARGER)] == [
        "fits",
        *2 * ["does_not_fit"],
    ]
    assert "ran out of memory here on 2026-05-01" in estimate(request, LARGER).notes[0]


def test_it_is_listed_with_its_reason_its_date_and_how_to_allow_it() -> None:
    reasons = [rejection.reason for rejection in recommend(_ask(_run(FIRST, "out_of_memory", 7))).rejected]
    (reason,) = [reason for reason in reasons if "dsplan db forget" in reason]
    assert reason.startswith(f"ran out of memory here on 2026-05-01 at micro-batch {FIRST.micro_batch_size}")
    assert "`dsplan db forget 00000000`" in reason


@pytest.mark.parametrize(("later", "proposed"), [(True, True), (False, False)])
def test_the_newest_run_of_a_plan_decides(*, later: bool, proposed: bool) -> None:
    failed, completed = _run(FIRST, "out_of_memory", 7, day=2), _run(FIRST, "completed", 8, day=3 if later else 1)
    assert (FIRST in _proposed(_ask(failed, completed))) is proposed
    assert len(_ask(failed, completed).experience.oom_records) == (0 if proposed else 1)


def test_a_newer_run_that_took_more_and_completed_takes_a_failure_back() -> None:
    failed = _run(FAILED, "out_of_memory", 7)
    assert not _ask(failed, _run(LARGER, "completed", 8, day=2)).experience.oom_records
    assert _ask(failed, _run(SMALLER, "completed", 8, day=2)).experience.oom_records


def test_a_failure_of_a_plan_that_offloads_is_taken_back_by_the_same_plan_alone() -> None:
    user = User()
    plain = next(
        configuration
        for configuration in user.configurations()
        if configuration.strategy == "zero3" and configuration.micro_batch_size == 4
    )
    smaller, offloads = replace(plain, activation_checkpointing="full"), replace(plain, offload="optimizer")

    def left(failed: Configuration, completed: Configuration) -> list[Configuration]:
        runs = (_run(failed, "out_of_memory", 7, user=user), _run(completed, "completed", 8, day=2, user=user))
        return [record.configuration for record in oom_records(runs[:1], runs[1:], user.request())]

    assert left(offloads, plain) == [offloads]
    assert left(offloads, offloads) == []
    assert left(smaller, plain) == []


@pytest.mark.parametrize("change", [{"seq_len": 512}, {"precision": "fp32"}, {"optimizer": "sgd"}])
def test_other_work_and_other_models_are_as_they_were(change: dict[str, Any]) -> None:
    failed = _run(FIRST, "out_of_memory", 7)
    assert not _ask(failed, **change).experience.oom_records
    store = MemoryStore()
    store.add(failed)
    assert not recall_from(store, replace(USER, model="distilgpt2").request()).experience.oom_records


def test_another_global_batch_is_the_same_work() -> None:
    assert _ask(_run(FIRST, "out_of_memory", 7), global_batch=32).experience.oom_records


def test_failures_elsewhere_say_nothing() -> None:
    gpus = User()
    assert not _ask(_run(gpus.configurations()[0], "out_of_memory", 7, user=gpus)).experience.oom_records


def test_a_gpu_with_more_free_memory_than_then_is_another_matter() -> None:
    request = User().request()
    configuration = User().configurations()[0]
    then = request.cluster.capacity_bytes
    oom_record = OomRecord(configuration=configuration, peak_allocated_bytes=1, capacity_bytes=then)
    assert oom_record.counts_on(request.cluster)
    assert not oom_record.counts_on(replace(request.cluster, capacity_bytes=then * 6 // 5))


def test_fewer_ranks_on_one_host_have_more_of_its_memory() -> None:
    request = USER.request()
    four = replace(FIRST, dp_replicate=4, dp_shard=1, gradient_accumulation_steps=1, micro_batch_size=16)
    assert not OomRecord(configuration=four, peak_allocated_bytes=1).counts_on(request.cluster)
    assert OomRecord(configuration=FIRST, peak_allocated_bytes=1).counts_on(request.cluster)


def test_a_plan_that_offloads_rules_out_only_what_takes_as_much_of_both_memories() -> None:
    user = User()
    request = user.request()
    base = next(
        configuration
        for configuration in user.configurations()
        if configuration.strategy == "zero3" and configuration.micro_batch_size == 4
    )
    offloads = replace(base, offload="optimizer")
    memory = price(request, offloads).memory
    oom_record = OomRecord(
        configuration=offloads,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        host_bytes_per_node=memory.host_bytes_per_node,
    )
    priced = price(request, base)
    assert priced.memory.peak_allocated_bytes > memory.peak_allocated_bytes
    assert priced.memory.host_bytes_per_node < memory.host_bytes_per_node
    assert not oom_record.rules_out(priced.job, priced.memory)
    more = price(request, replace(offloads, micro_batch_size=8, gradient_accumulation_steps=1))
    assert oom_record.rules_out(more.job, more.memory)
    unrecorded = replace(oom_record, host_bytes_per_node=None)
    assert not unrecorded.rules_out(more.job, more.memory), "either memory may have been short"
    itself = price(request, offloads)
    assert unrecorded.rules_out(itself.job, itself.memory)


def test_where_everything_took_as_much_nothing_is_proposed_and_the_reason_is_said() -> None:
    request = USER.request()
    experience = replace(request.experience, oom_records=(OomRecord(configuration=FIRST, peak_allocated_bytes=1),))
    answer = recommend(replace(request, experience=experience))
    assert not answer.plans
    assert answer.closest is not None
    assert "ran out of memory in this run" in answer.closest.notes[0]
