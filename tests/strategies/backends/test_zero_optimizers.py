"""Any optimizer under our own ZeRO: those that step whole tensors, those that step rows, and what cannot be stepped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies import zero_optimizer_bodies as bodies
from tests.strategies.zero_optimizer_bodies import OPTIMIZERS, Run

STAGES = ("zero1", "zero2", "zero3")
LEARNING = [name for name in OPTIMIZERS if name not in ("lbfgs", "sparse adam and a dense layer")]


def assert_equal(learned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert learned.keys() == expected.keys()
    for name, value in expected.items():
        assert (learned[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("optimizer", LEARNING)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=6, suite=lambda strategy: strategy in ("zero2", "zero3"))
def test_optimizers_learn_what_one_process_learns(strategy: str, optimizer: str, ranks: RankPool) -> None:
    run = Run(strategy=strategy, optimizer=optimizer)
    expected = ranks.run(bodies.reference, run)[0]  # on a rank, whose one thread rounds as those that train
    for learned in ranks.run(bodies.train, run):
        assert_equal(learned, expected)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon and signs", "lamb", "8-bit"])
@pytest.mark.sweep(every=2, suite=lambda optimizer: optimizer in ("adafactor", "muon and signs"))
def test_their_checkpoints_go_everywhere(
    optimizer: str, ranks: RankPool, three_ranks: RankPool, tmp_path: Path
) -> None:
    """Losses continue as if nothing had happened, whoever owns what."""
    for saver in ("zero3", "ddp"):
        folder = str(tmp_path / saver)
        expected = ranks.run(bodies.save, Run(strategy=saver, optimizer=optimizer), folder)[0]
        for strategy in ("zero1", "zero2", "zero3", "ddp"):
            for pool in (ranks, three_ranks):
                run = Run(strategy=strategy, optimizer=optimizer, world_size=pool.world_size)
                assert pool.run(bodies.resume, run, folder)[0] == pytest.approx(expected, rel=1e-5), strategy


@pytest.mark.parametrize(("optimizer", "tolerance"), [("adafactor", 1e-5), ("sparse adam", 1e-5), ("8-bit", 1e-4)])
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=3)
def test_three_ranks_accumulate_and_clip(
    strategy: str, optimizer: str, tolerance: float, three_ranks: RankPool
) -> None:
    """A third is rounded, which may turn one of 256 codes into the next."""
    run = Run(strategy=strategy, optimizer=optimizer, world_size=3, accumulation=2, clipping=0.3, is_built=True)
    assert_equal(three_ranks.run(bodies.train, run)[1], three_ranks.run(bodies.reference, run)[0], tolerance)


def test_a_dense_gradient_is_named_where_rows_are_stepped(ranks: RankPool) -> None:
    message = ranks.run(bodies.refusal, Run(optimizer="sparse adam and a dense layer"))[1]
    assert message.startswith("head.weight has a dense gradient, and its optimizer steps sparse ones alone; make its")


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3", "deepspeed"])
@pytest.mark.sweep(every=2, suite=lambda strategy, is_built: not is_built or strategy == "zero3")
def test_an_optimizer_that_computes_the_loss_itself_is_refused(
    strategy: str, is_built: bool, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue("deepspeed_ranks" if strategy == "deepspeed" else "ranks")
    backend, name = ("deepspeed", "zero1") if strategy == "deepspeed" else ("native", strategy)
    run = Run(strategy=name, backend=backend, optimizer="lbfgs", is_built=is_built)
    assert pool.run(bodies.refusal, run)[1] == (
        "optimizer LBFGS computes the loss again in a closure, which engine.step() has not; use AdamW, or another"
        " optimizer whose step() takes none"
    )


@pytest.mark.parametrize(
    ("strategy", "optimizer", "words"),
    [
        ("fsdp", "adafactor", "Adafactor cannot step the shards of strategy 'fsdp'; use ddp, or zero1 to zero3 with"),
        ("fsdp", "sparse adam", "words makes sparse gradients, which strategy 'fsdp' of backend 'torch' cannot reduce"),
        (
            "zero2",
            "sgd of few rows",
            "strategy 'zero2' of backend 'deepspeed' cannot reduce; make it with",
        ),
        ("zero1", "muon", "Muon cannot step the flat tensors of backend 'deepspeed'; use ddp, or zero1 to zero3 with"),
        ("zero1", "muon and signs", "MuonAndAdam cannot step the flat tensors"),
    ],
)
def test_what_other_backends_cannot_step(
    strategy: str, optimizer: str, words: str, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue("deepspeed_ranks" if strategy != "fsdp" else "ranks")
    message = pool.run(bodies.refusal, Run(strategy=strategy, backend="deepspeed", optimizer=optimizer))[0]
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("strategy", "optimizer", "tolerance"),
    [("ddp", "sparse adam", 1e-5), ("ddp", "8-bit", 1e-5), ("fsdp", "lamb", 1e-5), ("fsdp", "muon", 2**-6)],
)
@pytest.mark.sweep(every=2)
def test_ddp_and_fsdp_step_what_they_can(strategy: str, optimizer: str, tolerance: float, ranks: RankPool) -> None:
    """Muon works in bf16 (8 bits of mantissa), and FSDP2 adds the products of its shards in another order."""
    run = Run(strategy=strategy, optimizer=optimizer)
    expected = ranks.run(bodies.reference, run)[0]
    assert_equal(ranks.run(bodies.train, run)[0], expected, tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("how", ["held", "added"])
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=3, suite=lambda strategy, optimizer: optimizer == "adamw" or strategy == "zero3")
def test_parameters_join_late(strategy: str, how: str, optimizer: str, ranks: RankPool) -> None:
    """Unfrozen after `initialize`, and given to the optimizer before it or by `add_param_group`."""
    run = Run(strategy=strategy, optimizer=optimizer, accumulation=2)
    expected = ranks.run(bodies.reference_late, run, how)[0]
    for learned in ranks.run(bodies.train_late, run, how):
        assert_equal(learned, expected)
