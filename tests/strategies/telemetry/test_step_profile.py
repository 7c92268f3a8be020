"""Profiles of a run's steps: what viewers open, of the steps that were asked for, and nothing of the others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.cuda import _memory_viz

from hardware_db.errors import DsplanError
from strategies.launch.options import parse_profile
from strategies.run_directory.files import profile_paths, profiles_in
from strategies.telemetry.metrics import is_slowed, read_metrics, summarise
from strategies.variables import PROFILE
from tests.planner.emit.trace_format import Complete, Trace
from tests.strategies.profile_bodies import WIDTH, train


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROFILE, "4:5")
        train(directory, 8, torch.device("cpu"))
    return directory


def test_a_trace_is_of_the_steps_that_were_asked_for(profiled: Path) -> None:
    trace = msgspec.json.decode(profile_paths(profiled, 0)[0].read_bytes(), type=Trace)
    spans = [event for event in trace.traceEvents if isinstance(event, Complete)]
    steps = {span.name: span for span in spans if span.name.startswith("step ")}
    assert steps.keys() == {"step 4", "step 5"}
    for step in steps.values():
        inside = {span.name for span in spans if step.ts <= span.ts and span.ts + span.dur <= step.ts + step.dur}
        assert {"aten::addmm", "aten::mm", "Optimizer.step#AdamW.step"} <= inside


def test_torchs_viewer_takes_the_memory_of_a_step(profiled: Path) -> None:
    snapshot: dict[str, Any] = pickle.loads(profile_paths(profiled, 0)[1].read_bytes())
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    assert "snapshot.pickle" in _memory_viz.segment_plot(snapshot)
    assert "total_allocated" in _memory_viz.segsum(snapshot)  # it checks that sizes add up
    (segment,), (trace,) = snapshot["segments"], snapshot["device_traces"]
    taken: dict[int, int] = {}
    standing: dict[str, int] = {}
    peak = 0
    for event in trace:
        if event["action"] == "alloc":
            address, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or other + size <= address for other, size in taken.items())
            assert segment["address"] <= address
            assert end <= segment["address"] + segment["total_size"]
            taken[address] = event["size"]
            if event["frames"][0]["filename"] == "there before the step":
                kind = event["frames"][0]["name"]
                standing[kind] = standing.get(kind, 0) + event["size"]
        elif event["action"] == "free_completed":
            assert taken.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(taken.values()))
    assert sum(taken.values()) == segment["allocated_size"]
    weights = 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH + 512 // 4)  # the second bias takes a whole block of 512 bytes
    assert standing["weights"] >= weights
    assert standing["optimizer states"] >= 2 * weights
    frames = {frame["name"] for event in trace for frame in event["frames"]}
    assert {"aten.addmm.default", "train"} <= frames
    # At its peak a step has all gradients beside weights and states.
    assert peak >= standing["weights"] + standing["optimizer states"] + weights


def test_slow_steps_count_for_nothing(profiled: Path) -> None:
    rows = [row for row in read_metrics(profiled, 1)[0] if row["event"] == "step"]
    assert [row["global_step"] for row in rows if row.get("profiled")] == [4, 5, 6]
    assert [row["global_step"] for row in rows if is_slowed(row)] == [3, 4, 5, 6]
    settled = [row["seconds"] for row in rows if row["global_step"] in (7, 8)]
    assert summarise([rows]).step_seconds == pytest.approx(sum(settled) / 2)


def test_a_run_that_ends_before_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PROFILE, "5:5")
    train(tmp_path, 3, torch.device("cpu"))
    assert "dsplan: --profile 5: these ranks ran no step 5\n" in capfd.readouterr().err
    assert profiles_in(tmp_path) == {}
    train(tmp_path, 5, torch.device("cpu"))
    assert "no step after 5 to count memory in" in capfd.readouterr().err
    assert [path.name for paths in profiles_in(tmp_path).values() for path in paths] == ["profile-rank0.trace.json"]
    monkeypatch.delenv(PROFILE)
    train(tmp_path / "unasked", 3, torch.device("cpu"))
    assert profiles_in(tmp_path / "unasked") == {}
    assert "profiled" not in json.dumps(read_metrics(tmp_path / "unasked", 1))


def test_steps_are_a_number_or_two() -> None:
    assert (parse_profile("20"), parse_profile(" 20:22 ")) == ("20:20", "20:22")
    for text in ("0", "5:4", "-1", "1:101", "x", "1:2:3", ""):
        with pytest.raises(DsplanError, match="write 20, or 20:22"):
            parse_profile(text)
