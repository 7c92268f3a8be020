"""GPT-2 and BERT on real text: the examples have DDP's losses under our ZeRO, and one resumes where the other ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.files import HOME
from tests.strategies.example_bodies import losses_of, run_example

pytest.importorskip("transformers")
SHORT = ["--steps", "4", "--sequence-length", "32", "--global-batch", "8"]


def train(ranks: RankPool, name: str, strategy: str, folder: Path, *options: str) -> list[float]:
    backend, _, stage = strategy.rpartition(" ")
    arguments = [*SHORT, *options, *(["--backend", backend] if backend else [])]
    environment = {"DSPLAN_STRATEGY": stage, "DSPLAN_RUN_DIR": str(folder), HOME: os.environ[HOME]}
    ranks.run(run_example, name, environment, arguments)
    return losses_of(folder)


@pytest.mark.parametrize("name", ["train_gpt2", pytest.param("finetune_bert", marks=pytest.mark.slow)])
def test_our_zero_has_the_losses_of_ddp(name: str, ranks: RankPool, tmp_path: Path) -> None:
    expected = train(ranks, name, "ddp", tmp_path / "ddp")
    assert len(expected) == 4
    assert name != "train_gpt2" or expected[-1] < expected[0] - 0.1
    for strategy in ("native zero2", "native zero3"):
        assert train(ranks, name, strategy, tmp_path / strategy) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_bert_is_fine_tuned_from_what_pretraining_exported(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "bert"
    losses = train(ranks, "pretrain_bert", "native zero3", tmp_path / "pretraining", "--out", str(out))
    assert losses[-1] < losses[0] - 0.1
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json"}
    fresh = train(ranks, "finetune_bert", "ddp", tmp_path / "fresh")
    tuned = train(ranks, "finetune_bert", "ddp", tmp_path / "tuned", "--pretrained", str(out))
    assert tuned[0] != pytest.approx(fresh[0], rel=1e-4), "it does not begin with random weights"
    assert train(ranks, "finetune_bert", "native zero2", tmp_path / "zero2", "--pretrained", str(out)) == pytest.approx(
        tuned, rel=1e-5
    )


@pytest.mark.slow
def test_gpt2_resumes_from_its_checkpoint_under_another_strategy(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    expected = train(ranks, "train_gpt2", "ddp", tmp_path / "unbroken", "--steps", "6")
    first = train(ranks, "train_gpt2", "native zero3", tmp_path / "first", "--save", folder)
    rest = train(ranks, "train_gpt2", "ddp", tmp_path / "rest", "--save", folder, "--steps", "6")
    assert [*first, *rest] == pytest.approx(expected, rel=1e-5)
