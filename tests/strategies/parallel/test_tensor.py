"""Layers split over tensor-parallel ranks train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_db.spawn import RankPool
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Difference, Kind

TP = Composition(strategy="ddp", tp=2)
FSDP = Composition(strategy="fsdp", dp_shard=2, tp=2)


def _worst(found: list[Difference]) -> Difference:
    return max(found, key=lambda difference: max(difference.loss, difference.parameter))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral", "gpt", "numbered"])
def test_two_ranks_train_as_one_process(ranks: RankPool, kind: Kind) -> None:
    worst = _worst(ranks.run(parallel_bodies.train, kind, replace(TP, clipping=0.5)))
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst
    assert worst.share < 0.7


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_split_sequences_train_as_one_process(ranks: RankPool, kind: Kind, strategy: str) -> None:
    split = replace(TP, strategy=strategy, sequence_parallel=True, accumulation=2, checkpointing="full", clipping=0.5)
    worst = _worst(ranks.run(parallel_bodies.train, kind, split))
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        FSDP,
        replace(FSDP, sequence_parallel=True, checkpointing="full"),
        replace(FSDP, checkpointing="selective", clipping=0.5, accumulation=2),
        replace(FSDP, strategy="ddp", dp_shard=1, dp_replicate=2),
        replace(FSDP, dp_shard=1, tp=4),
        replace(FSDP, precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_four_ranks_train_as_one_process(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    if composition.sequence_parallel and kind in ("gpt2", "gpt"):
        pytest.skip(f"{kind} has no tensor-parallel plan that says where it gathers tokens")
    worst = _worst(four_ranks.run(parallel_bodies.train, kind, composition))
    assert max(worst.loss, worst.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), worst
