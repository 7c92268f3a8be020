"""A benchmark and what is stored, the clock, other benchmarks, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dsplan.diagnostics.bench import session
from dsplan.diagnostics.bench.plan import BenchPlan, Wanted, make_bench_plan
from dsplan.diagnostics.bench.rank_pool import RankError
from dsplan.diagnostics.bench.session import (
    Begun,
    BenchSession,
    Event,
    Limits,
    Measured,
    MeasuredElsewhere,
    Refused,
    Started,
    TimeIsUp,
)
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement
from hardware_db.microbench.grid import Point, Rate, Refusal, as_measurement
from hardware_db.store import MemoryStore
from planner.cluster.resolve import probed_cluster
from tests.dsplan.diagnostics.bench.samples import LAPTOP, launches


class Ranks:
    """In place of ranks: answers each call and remembers it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer: Callable[[Point], Any] = lambda point: Rate(point=point, value=2.0, unit="bytes/s", repeats=3)

    def __call__(self, *, gpu: bool) -> Ranks:
        return self

    def run(self, ranks: int, function: Any, work: Any, *arguments: Any, deepspeed: bool = False) -> list[Any]:
        self.calls.append(work)
        return [self.answer(work)] * ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    fake = Ranks()
    monkeypatch.setattr(session, "Pools", fake)
    return fake


def events_of(points: tuple[Point, ...], store: MemoryStore, limits: Limits | None = None) -> list[Event]:
    return list(BenchSession(BenchPlan(device="cpu", points=points), LAPTOP, store, limits or Limits()).events())


def test_every_point_is_stored_before_it_is_reported(ranks: Ranks) -> None:
    store = MemoryStore()
    points = launches(3, ranks=2)
    told = 0
    for event in BenchSession(BenchPlan(device="cpu", points=points), LAPTOP, store, Limits()).events():
        if isinstance(event, Measured):
            told += 1
            assert event.record == store.rates()[0]
            assert len(store.rates()) == told
    assert told == 3
    assert {(rate.source, rate.ranks, rate.repeats) for rate in store.rates()} == {("bench", 2, 3)}


def test_what_is_stored_is_not_measured_again(ranks: Ranks) -> None:
    store = MemoryStore()
    points = launches(4)
    events_of(points[:3], store)
    events = events_of(points, store)
    assert events[0] == Begun(total=4, stored=3)
    assert ranks.calls[3:] == [points[3]]


def test_other_versions_are_measured_for_themselves(ranks: Ranks) -> None:
    from dataclasses import replace

    store = MemoryStore()
    events_of(launches(2), store)
    newer = replace(LAPTOP, software=replace(LAPTOP.software, python="3.14"))
    events = list(BenchSession(BenchPlan(device="cpu", points=launches(2)), newer, store, Limits()).events())
    assert events[0] == Begun(total=2, stored=0)
    assert len(store.rates()) == 4


def test_again_measures_everything(ranks: Ranks) -> None:
    store = MemoryStore()
    events_of(launches(2), store)
    assert events_of(launches(2), store, Limits(again=True))[0] == Begun(total=2, stored=0)
    assert len(store.rates()) == 4


def test_nothing_new_is_begun_after_the_time(ranks: Ranks) -> None:
    store = MemoryStore()
    events = events_of(launches(3), store, Limits(seconds=0.0))
    assert events == [Begun(total=3, stored=0), TimeIsUp(left=3)]
    assert not ranks.calls


def test_what_is_refused_is_reported_and_the_rest_continues(ranks: Ranks) -> None:
    store = MemoryStore()
    first, second, third = launches(3)

    def answer(point: Point) -> Any:
        if point == first:
            return Refusal(reason="not on this machine")
        if point == second:
            raise RankError("rank 1 of 2 failed: RuntimeError: lost", {1: "a long\ntraceback"})
        return Rate(point=point, value=1.0, unit="s")

    ranks.answer = answer
    events = events_of((first, second, third), store)
    refused = [event for event in events if isinstance(event, Refused)]
    assert [event.reason for event in refused] == ["not on this machine", "rank 1 of 2 failed: RuntimeError: lost"]
    assert [rate.size for rate in store.rates()] == [third.size]
    assert events_of((first, second, third), store)[0] == Begun(total=3, stored=1)


def test_what_another_benchmark_measured_meanwhile_is_taken(ranks: Ranks) -> None:
    store = MemoryStore()
    points = launches(2)
    events = BenchSession(BenchPlan(device="cpu", points=points), LAPTOP, store, Limits()).events()
    assert next(events) == Begun(total=2, stored=0)
    assert next(events) == Started(work=points[0])
    store.add(as_measurement(Rate(point=points[0], value=1.0, unit="s"), fingerprint(LAPTOP), "bench"))
    assert next(events) == MeasuredElsewhere(work=points[0])
    assert [type(event) for event in events] == [Started, Measured]
    assert ranks.calls == [points[1]]


def test_a_training_run_that_ran_out_of_memory_is_remembered(ranks: Ranks) -> None:
    store = MemoryStore()
    wanted = Wanted(ranks=(2,), kinds=("training",), deepspeed=False)
    plan = make_bench_plan(wanted, probed_cluster(LAPTOP))

    def answer(trainee: Any) -> Any:
        raise RankError("rank 0 of 2 failed: RuntimeError: CUDA out of memory", {})

    ranks.answer = answer
    events = list(BenchSession(plan, LAPTOP, store, Limits()).events())
    records = [event.record for event in events if isinstance(event, Measured)]
    assert all(isinstance(record, Measurement) and record.outcome == "out_of_memory" for record in records)
    assert len(records) == len(plan.training) == store.count()
    assert next(BenchSession(plan, LAPTOP, store, Limits()).events()) == Begun(total=len(records), stored=len(records))


def test_the_process_that_draws_the_progress_imports_no_torch() -> None:
    modules = "dsplan.diagnostics.bench.benchmark, dsplan.diagnostics.bench.session"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
