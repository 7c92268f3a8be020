"""Compositions that the planner calls runnable train as one process does; `scripts.measure.parity` trains all."""

from __future__ import annotations

import pytest

from hardware_db.spawn import RankPool
from scripts.measure.parity import compositions, measure
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Kind


def test_what_is_trained_is_what_the_planner_calls_runnable() -> None:
    plans = list(compositions("llama", 4, "fp32"))
    chosen = [plan.configuration for plan in plans]
    assert all(plan.runnable for plan in plans)
    assert len(set(chosen)) == len(chosen)
    assert {"ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3"} <= {each.strategy for each in chosen}
    assert {(each.tp, each.pp) for each in chosen} >= {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)}
    assert {each.pp_schedule for each in chosen} >= {"gpipe", "1f1b", "interleaved"}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "composition",
    [
        Composition(tp=2, sequence_parallel=True, steps=2),
        Composition(pp=2, accumulation=2, steps=2),
        Composition(cp=2, steps=2, strategy="fsdp"),
    ],
)
def test_a_loss_without_logits_goes_with_every_split(ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for found in ranks.run(parallel_bodies.train, kind, composition, None, {"linear_cross_entropy": "chunked"}):
        assert max(found.loss, found.parameter) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("only", ["fsdp tp 2", "zero1 (native) tp 2,", "ddp pp 2, 1f1b"])
def test_compositions_of_two_ranks_train_as_one_process(only: str) -> None:
    runs = [run for run in measure("llama", 2, "fp32", only) if not run.sequence_parallel]
    assert runs
    assert [(run.name, run.outcome) for run in runs] == [(run.name, "same") for run in runs]
