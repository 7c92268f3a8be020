"""The step on two streams is the step that the model of time adds up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from planner.cost.timing import step_time
from planner.cost.timing.timeline import MOST_MICRO_BATCHES, Span, step_timeline
from tests.planner.cost.timing.cases import cluster, make_job

TWO_NODES = {"where": cluster(nodes=2)}


def of(spans: tuple[Span, ...], stream: str) -> list[Span]:
    return [span for span in spans if span.stream == stream]


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "ddp", "gradient_accumulation_steps": 2},
        {"strategy": "fsdp", "gradient_accumulation_steps": 3},
        {"strategy": "fsdp", "gradient_accumulation_steps": 3, "sync_each_micro_batch": False, **TWO_NODES},
        {"strategy": "fsdp-grad-op", "activation_checkpointing": "full", **TWO_NODES},
        {"strategy": "zero1", "gradient_accumulation_steps": 8},
        {"strategy": "zero2", "gradient_accumulation_steps": 2},
        {"strategy": "zero3", "offload": "optimizer"},
        {"strategy": "fsdp", "tp": 2, "gradient_accumulation_steps": 4},
        {"strategy": "fsdp", "pp": 4, "gradient_accumulation_steps": 16},
        {"strategy": "ddp", "tp": 2, "pp": 2, "gradient_accumulation_steps": 6, **TWO_NODES},
    ],
    ids=lambda changes: " ".join(f"{name} {value}" for name, value in changes.items() if name != "where"),
)
def test_it_ends_with_the_step_and_shows_what_is_exposed(changes: dict[str, Any]) -> None:
    job = make_job("facebook/opt-1.3b", micro_batch_size=2, **changes)
    time, spans = step_time(job), step_timeline(job)
    assert max(span.end for span in spans) == pytest.approx(time.step_seconds)
    assert sum(span.exposed for span in spans) == pytest.approx(time.exposed_communication_seconds)
    for stream in ("compute", "communication", "transfer"):
        assert all(first.end <= second.start + 1e-9 for first, second in pairwise(of(spans, stream)))


def test_what_is_hidden_runs_beside_compute() -> None:
    spans = step_timeline(make_job("facebook/opt-1.3b", strategy="fsdp", micro_batch_size=8))
    compute = of(spans, "compute")
    for span in of(spans, "communication"):
        beside = sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in compute)
        assert beside > 0 or span.exposed == pytest.approx(span.seconds)
        assert span.exposed <= span.seconds + 1e-12


def test_many_micro_batches_are_drawn_together() -> None:
    spans = step_timeline(make_job("facebook/opt-1.3b", strategy="zero2", gradient_accumulation_steps=64))
    (middle,) = [span for span in of(spans, "compute") if span.kind == "middle"]
    assert middle.name == "micro-batches 3 to 63"
    assert len(spans) < 20 * MOST_MICRO_BATCHES
