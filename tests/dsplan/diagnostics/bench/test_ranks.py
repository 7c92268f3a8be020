"""Points and training runs on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.plan import BenchPlan, Wanted, make_bench_plan
from dsplan.diagnostics.bench.rank_pool import RankPool
from dsplan.diagnostics.bench.session import Begun, BenchSession, Limits, Measured, Refused, measure_point
from hardware_db.microbench.grid import COLLECTIVES, Point, Rate, Refusal
from hardware_db.probe import probe
from hardware_db.store import open_store
from planner.cluster.resolve import probed_cluster

SIZE = 4096


@pytest.fixture(scope="module")
def three(new_pool: Callable[..., RankPool]) -> Iterator[RankPool]:
    """An odd number of ranks: no share is the whole, and one rank has nobody to send to."""
    with new_pool(3, variables={"CUDA_VISIBLE_DEVICES": ""}) as pool:
        yield pool


@pytest.mark.parametrize("name", ["barrier", "all_reduce_latency", *COLLECTIVES])
@pytest.mark.sweep(every=3)
def test_ranks_agree_on_the_rate_of_a_collective(name: str, three: RankPool) -> None:
    latency = name in ("barrier", "all_reduce_latency")
    point = Point(operation=name, dtype="" if latency else "fp32", size=0 if latency else SIZE, ranks=3)
    rates = three.run(measure_point, point, 1)
    assert all(isinstance(rate, Rate) and rate == rates[0] for rate in rates), rates
    assert rates[0].value > 0
    assert rates[0].unit == ("s" if latency else "bytes/s")
    assert rates[0].repeats >= 3


@pytest.mark.parametrize("name", ["matmul", "attention_backward", "cpu_adamw_fused", "disk_read"])
def test_ranks_that_share_processors_agree_on_what_each_does_alone(
    name: str, three: RankPool, dsplan_home: Path
) -> None:
    shape = {"matmul": (64, 64, 64), "attention_backward": (1, 2, 16, 8)}.get(name, ())
    point = Point(operation=name, dtype="fp32", size=0 if shape else SIZE, shape=shape, ranks=3)
    rates = three.run(measure_point, point, 1)
    assert all(isinstance(rate, Rate) and rate == rates[0] for rate in rates), rates


def test_what_torch_refuses_is_an_answer_and_leaves_the_ranks_alive(three: RankPool) -> None:
    before = three.process_ids
    answers = three.run(measure_point, Point(operation="host_to_device", size=SIZE, ranks=3), 1)
    assert all(isinstance(answer, Refusal) and answer.reason and "\n" not in answer.reason for answer in answers)
    assert three.process_ids == before


@pytest.mark.usefixtures("dsplan_home")
@pytest.mark.slow
def test_a_strategy_is_trained_and_stored_beside_what_was_predicted() -> None:
    machine = probe()
    whole = make_bench_plan(Wanted(ranks=(2,), kinds=("training",), deepspeed=False), probed_cluster(machine))
    plan = BenchPlan(device=whole.device, training=whole.training[1:2])
    with open_store() as store:
        events = list(BenchSession(plan, machine, store, Limits()).events())
        assert not [event for event in events if isinstance(event, Refused)]
        assert events[0] == Begun(total=1, stored=0)
        assert next(BenchSession(plan, machine, store, Limits()).events()) == Begun(total=1, stored=1)
        (record,) = store.list()
    assert [event.record for event in events if isinstance(event, Measured)] == [record]
    assert (record.source, record.outcome, record.model) == ("bench", "completed", "bench-llama-5m")
    assert record.strategy == "fsdp"
    assert record.measured.steps >= 2 + 1 + 1 + 3  # to warm up, with memory counted, to time one, to measure
    assert record.measured.step_seconds
    assert record.measured.peak_allocated_bytes
    assert record.measured.host_bytes is None
    assert record.predicted.step_seconds
