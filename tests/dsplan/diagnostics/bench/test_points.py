"""The meaning of each kind of point: the arithmetic from seconds to a rate, and the grids they are taken from."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardware_db.microbench import collectives, compute, memory, timer
from hardware_db.microbench.grid import (
    COLLECTIVES,
    CPU,
    GPU,
    HOST_LINKS,
    KINDS,
    Point,
    Rate,
    all_points,
    as_measurement,
    point_of,
    quick_points,
)
from hardware_db.microbench.runner import MEASURES, measure
from hardware_db.microbench.timer import Budget, Timing, time_calls
from hardware_db.units import KIB, MIB
from tests.dsplan.diagnostics.bench.samples import FINGERPRINT

HOST = torch.device("cpu")
SHORT = Budget(seconds=0.002, sample_seconds=0.0005)


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation runs once and is said to take 0.5 s."""

    def pretend(operation: Callable[[], object], *arguments: Any, **more: Any) -> Timing:
        operation()
        return Timing(seconds=0.5, repeats=7, spread=0.25)

    for module in (collectives, compute, memory):
        monkeypatch.setattr(module, "time_calls", pretend)


@pytest.mark.parametrize(
    ("point", "value"),
    [
        (Point(operation="matmul", dtype="fp32", shape=(3, 5, 7)), 2 * 3 * 5 * 7 / 0.5),
        (Point(operation="matmul_backward", dtype="bf16", shape=(3, 5, 7)), 4 * 3 * 5 * 7 / 0.5),
        (Point(operation="attention", dtype="fp32", shape=(2, 3, 8, 4)), 4 * 2 * 3 * 8 * 8 * 4 / 0.5),
        (Point(operation="attention_backward", dtype="fp32", shape=(2, 3, 8, 4)), 10 * 2 * 3 * 8 * 8 * 4 / 0.5),
        (Point(operation="memory", size=4096), 2 * 4096 / 0.5),
        (Point(operation="clone", size=4096), 2 * 4096 / 0.5),
        (Point(operation="elementwise", dtype="bf16", size=4096), 2 * 4096 / 0.5),
        (Point(operation="launch"), 0.5),
        (Point(operation="cpu_adamw", dtype="fp32", size=4096), 1024 / 0.5),
        (Point(operation="cpu_adamw_fused", dtype="fp32", size=4096), 1024 / 0.5),
        (Point(operation="disk_write", size=4096), 4096 / 0.5),
        (Point(operation="disk_read", size=4096), 4096 / 0.5),
    ],
    ids=lambda value: value.operation if isinstance(value, Point) else "",
)
@pytest.mark.usefixtures("half_a_second")
def test_a_rate_is_the_work_over_the_seconds(point: Point, value: float) -> None:
    rate = measure(point, HOST, SHORT)
    assert (rate.point, rate.value, rate.repeats, rate.spread) == (point, value, 7, 0.25)


def test_bus_bandwidth_counts_what_passes_a_link() -> None:
    """nccl-tests, doc/PERFORMANCE.md."""
    shares = {name: collectives.bus_share(name, 4) for name in COLLECTIVES}
    assert shares.pop("all_reduce") == 1.5
    assert {name for name, share in shares.items() if share == 1.0} == {"broadcast", "reduce", "point_to_point"}
    assert set(shares.values()) == {1.0, 0.75}


def test_a_sample_is_long_against_the_calls_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: calls * 2.0**-19))  # 2 us a call
    timing = time_calls(count, HOST, Budget(seconds=0.004, sample_seconds=0.001))
    assert timing == Timing(seconds=2.0**-19, repeats=5, spread=0.0)
    assert calls == 3 + 5 * 524, "a sample of 1 ms, after three calls to warm up"


def test_the_median_and_the_spread_are_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([0.3, 0.4, 3.0, 2.0, 6.0])  # the first two are the warm-up's
    monkeypatch.setattr(timer, "_sample", lambda operation, calls, device: next(samples))
    timing = time_calls(lambda: None, HOST, Budget(seconds=0.1, sample_seconds=0.01, least_samples=3))
    assert timing == Timing(seconds=3.0, repeats=3, spread=2.0)


def test_a_long_call_is_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([0.9, 2.0, 1.0])
    monkeypatch.setattr(timer, "_sample", lambda operation, calls, device: next(samples))
    assert time_calls(lambda: None, HOST, Budget()) == Timing(seconds=1.5, repeats=2, spread=1.0)


def test_every_operation_of_the_grid_can_be_measured_and_is_named_by_a_kind() -> None:
    names = {name for names in KINDS.values() for name in names}
    assert names == set(MEASURES)
    on_cpu, on_gpu = ({point.operation for point in all_points(scale, 2)} for scale in (CPU, GPU))
    assert on_cpu | on_gpu == names
    assert on_gpu - on_cpu == set(HOST_LINKS)


@pytest.mark.parametrize("scale", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_first_points_are_those_of_a_training_script(scale: Any, ranks: int) -> None:
    quick, every = quick_points(scale, ranks), all_points(scale, ranks)
    assert every[: len(quick)] == quick
    assert len(set(every)) == len(every)
    assert {point.ranks for point in every} == {ranks}
    assert any(point.operation in COLLECTIVES for point in every) == (ranks > 1)


def test_collectives_are_measured_from_a_kibibyte_up() -> None:
    for scale, largest in ((CPU, 64 * MIB), (GPU, 1024 * MIB)):
        sizes = [point.size for point in all_points(scale, 2) if point.operation == "all_gather"]
        assert (min(sizes), max(sizes)) == (KIB, largest)


def test_a_point_comes_back_from_its_record() -> None:
    for point in (*all_points(CPU, 3), *all_points(GPU, 8)):
        record = as_measurement(Rate(point=point, value=1.0, unit="s"), FINGERPRINT, "bench")
        assert point_of(record) == point
        assert record.source == "bench"
