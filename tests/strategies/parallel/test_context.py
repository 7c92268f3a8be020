"""Sequences that ranks share train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_db.spawn import RankPool
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Kind

CP = Composition(strategy="fsdp", cp=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_two_ranks_train_as_one_process(ranks: RankPool, kind: Kind) -> None:
    composition = replace(CP, clipping=0.5, checkpointing="full", accumulation=2)
    for found in ranks.run(parallel_bodies.train, kind, composition):
        assert max(found.loss, found.parameter, found.norm) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(CP, dp_shard=2, checkpointing="full"),
        replace(CP, cp=4, strategy="ddp"),
        replace(CP, tp=2),
        replace(CP, dp_shard=2, strategy="zero1"),
        replace(CP, dp_shard=2, precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_four_ranks_train_as_one_process(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for found in four_ranks.run(parallel_bodies.train, kind, composition):
        assert max(found.loss, found.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), found
