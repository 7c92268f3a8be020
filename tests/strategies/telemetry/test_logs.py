"""Files that a config's logs, timers, traces and memory lines leave behind."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.errors import BackendMissing
from strategies.telemetry import timers as timers_module
from strategies.telemetry.tensorboard_log import TensorboardWriter
from strategies.telemetry.timers import Timers
from strategies.telemetry.traces import communication_time, merge, overlap
from tests.strategies import engine_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

PoolOf = Callable[[str], RankPool]
SECTIONS = ("forward", "backward", "step", "preparing", "whole_step", "communication", "exposed_communication")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "native zero2"])
@pytest.mark.sweep(every=2)
def test_steps_are_logged(strategy: str, pool_of: PoolOf, tmp_path: Path) -> None:
    backend, _, name = strategy.rpartition(" ")
    recipe = Recipe(strategy=name, backend=backend, world_size=2)
    losses = pool_of(strategy).run(engine_bodies.logged, recipe, str(tmp_path))
    for rank in range(2):
        assert column(tmp_path, rank, "loss") == pytest.approx(dict(enumerate(losses[rank], start=1)))
        assert column(tmp_path, rank, "learning_rate") == dict.fromkeys(range(1, 7), engine_bodies.RATE)
        assert min(column(tmp_path, rank, "gradient_norm").values()) > 0
        seconds = {section: column(tmp_path, rank, f"{section}_seconds") for section in SECTIONS}
        for step in (3, 6):
            parts = sum(seconds[part][step] for part in ("forward", "backward", "step", "preparing"))
            assert 0 < parts <= seconds["whole_step"][step]
            assert 0 <= seconds["exposed_communication"][step] <= seconds["communication"][step]
            assert seconds["communication"][step] > 0
        trace = json.loads((tmp_path / "traces" / f"trace-rank{rank}.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {"forward", "backward", "step", "preparing"} <= names
        assert any(name.startswith("gloo:") for name in names)
    scalars = tensorboard_scalars(tmp_path / "events")
    assert scalars["train/loss"] == pytest.approx(dict(enumerate(losses[0], start=1)))
    assert scalars["train/learning_rate"][6] == pytest.approx(engine_bodies.RATE)
    assert scalars["seconds/communication_seconds"].keys() == {3, 6}
    assert scalars["memory/host_bytes"][6] > 2**20


def column(folder: Path, rank: int, figure: str) -> dict[int, float]:
    with open(folder / "tables" / f"rank{rank}" / f"{figure}.csv", newline="") as file:
        return {int(row["step"]): float(row[figure]) for row in csv.DictReader(file)}


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_lines_are_printed_at_the_pace_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2}
    engine = engine_bodies.engine_of(Recipe(), config)
    losses = [training_bodies.one_step(engine, step) for step in range(5)]
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("dsplan: step")]
    assert [line.split(",")[0] for line in steps] == ["dsplan: step 2", "dsplan: step 4"]
    assert f"loss {losses[3]:.4g}, lr 0.002" in steps[1]
    for section in ("per step", "forward", "backward", "communication"):
        assert section in steps[1]
    assert sum(line.startswith("memory of rank 0") for line in lines) == 2
    engine.close()
    assert capsys.readouterr().out.startswith("dsplan: step 5")


def test_nothing_watches_an_engine_that_was_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPLAN_RUN_DIR", raising=False)
    assert engine_bodies.engine_of(Recipe()).observers == []


def test_timers_add_up_sections_and_begin_anew() -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        timers.starts("a")
        timers.ends("a")
    timers.starts("left open")
    timers.ends("never begun")
    assert list(timers.take()) == ["a"]
    assert timers.take() == {}


class Ticks:
    """A clock that has moved on by a second whenever it is asked."""

    def __init__(self) -> None:
        self._time = 0

    def now(self) -> int:
        self._time += 1
        return self._time

    def seconds(self, start: int, end: int) -> float:
        return end - start


def test_the_profiled_step_is_in_no_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timers_module, "HostClock", Ticks)
    engine_bodies.logged(Recipe(), str(tmp_path))
    for section in ("preparing", "forward", "backward", "step"):
        assert column(tmp_path, 0, f"{section}_seconds") == {3: 1.0, 6: 1.0}, section


class Event:
    """An event of a profile: its name, and where it began and ended in seconds."""

    def __init__(self, name: str, start: int, end: int, *, on_gpu: bool = False) -> None:
        self._name, self._start, self._end = name, start * 10**9, end * 10**9
        self._kind = torch._C._autograd.DeviceType.CUDA if on_gpu else torch._C._autograd.DeviceType.CPU

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start

    def device_type(self) -> Any:
        return self._kind


def test_communication_is_exposed_where_nothing_is_computed() -> None:
    events = [Event("gloo:send", 0, 4), Event("gloo:recv", 2, 6), Event("aten::mm", 1, 3), Event("aten::add", 5, 9)]
    times = communication_time(events, on_gpu=False)
    assert (times.seconds, times.exposed_seconds) == (6.0, 3.0)
    kernels = [
        Event("ncclDevKernel_AllReduce", 0, 4, on_gpu=True),
        Event("gemm", 3, 9, on_gpu=True),
        Event("Memcpy DtoD", 0, 9, on_gpu=True),
        Event("aten::mm", 0, 9),
    ]
    times = communication_time(kernels, on_gpu=True)
    assert (times.seconds, times.exposed_seconds) == (4.0, 3.0)


def test_intervals() -> None:
    assert merge([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(1, 2), (3, 10)]) == 3
    assert overlap([], [(0, 1)]) == 0


def test_a_missing_tensorboard_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("strategies.telemetry.tensorboard_log.import_module", missing)
    with pytest.raises(BackendMissing, match=r"pip install dsplan\[tensorboard\]"):
        TensorboardWriter.in_directory(tmp_path)
