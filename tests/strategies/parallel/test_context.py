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


STAGES = replace(CP, pp=2, accumulation=4, steps=2)


@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("llama", replace(STAGES, checkpointing="full", clipping=0.5, schedule="interleaved", virtual_stages=2)),
        ("gpt", replace(STAGES, strategy="ddp", schedule="zero-bubble")),
        ("gpt2", replace(STAGES, strategy="zero2", schedule="gpipe")),
    ],
)
def test_stages_of_a_pipeline_share_sequences(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for found in four_ranks.run(parallel_bodies.train, kind, composition):
        assert max(found.loss, found.parameter, found.norm) < 1e-5, found
        assert found.share < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(STAGES, tp=2, sequence_parallel=True),
        replace(STAGES, cp=4),
        replace(STAGES, pp=4),
        replace(STAGES, dp_replicate=2, strategy="hsdp"),
        replace(STAGES, dp_shard=2, strategy="zero1", schedule="interleaved", virtual_stages=2),
        replace(STAGES, dp_replicate=2, strategy="ddp", precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_eight_ranks_train_as_one_process(eight_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for found in eight_ranks.run(parallel_bodies.train, kind, composition):
        assert max(found.loss, found.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), found


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
