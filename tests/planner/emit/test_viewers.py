"""Files that other people's viewers open: their form, and that they say what the plan says."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgspec
import pytest
from torch.cuda import _memory_viz

from planner.cost.memory import memory_estimate
from planner.cost.timing import step_time
from planner.emit.viewers import chrome_trace, memory_snapshot
from planner.types.job import Job
from planner.types.plan import MemoryEstimate
from tests.planner.cost.timing.cases import make_job
from tests.planner.emit.trace_format import Complete, Counter, Name, Trace


@pytest.fixture(params=["fsdp", "ddp", "zero2"])
def job(request: pytest.FixtureRequest) -> tuple[Job, MemoryEstimate]:
    job = make_job("facebook/opt-1.3b", strategy=request.param, micro_batch_size=2, gradient_accumulation_steps=2)
    return job, memory_estimate(job)


def test_a_chrome_trace_is_one_and_ends_with_the_step(job: tuple[Job, MemoryEstimate]) -> None:
    trace = msgspec.json.decode(chrome_trace(*job), type=Trace)
    spans = [event for event in trace.traceEvents if isinstance(event, Complete)]
    assert max(span.ts + span.dur for span in spans) == pytest.approx(1e6 * step_time(job[0]).step_seconds)
    threads = {event.tid for event in trace.traceEvents if isinstance(event, Name)}
    assert {span.tid for span in spans} <= threads
    counters = [event for event in trace.traceEvents if isinstance(event, Counter)]
    assert max(sum(event.args.values()) for event in counters) == pytest.approx(job[1].peak_allocated_bytes, abs=8)


def test_torchs_viewer_takes_a_memory_snapshot(job: tuple[Job, MemoryEstimate]) -> None:
    content = memory_snapshot(*job)
    snapshot: dict[str, Any] = pickle.loads(content)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    assert "total_allocated" in _memory_viz.segsum(snapshot)  # it checks that sizes add up
    assert "activations (backward)" in json.dumps(snapshot) or "gradients (backward)" in json.dumps(snapshot)
    alive = peak = 0
    for event in snapshot["device_traces"][0]:
        alive += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        peak = max(peak, alive)
    largest = max(size for phase, size in job[1].phases.items())
    assert largest == pytest.approx(job[1].peak_allocated_bytes, abs=8)
    assert alive == pytest.approx(job[1].phases["step"], abs=8)
    assert peak == pytest.approx(largest, abs=8)
