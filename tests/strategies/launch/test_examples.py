"""The example scripts, which know nothing of dsplan, train on two CPU ranks under a plan made from their live model.

The same scripts then train under a plan file that spreads the same global batch differently.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_db.files import database_path
from hardware_db.store import open_store
from planner.types.plan_io import load_plan, save_plan
from tests.strategies.launch.command import EXAMPLES, run

STEPS = 6
LIBRARIES = {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "deepspeed_loop": "deepspeed"}


def _train(name: str, cwd: Path, *options: str | Path) -> dict[str, Any]:
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    script = EXAMPLES / f"{name}.py"
    finished = run(*options, "--json", script, "--steps", str(STEPS), "--sequence-length", "64", cwd=cwd)
    assert finished.status == 0, finished.err
    return {**finished.json, "stderr": finished.err}


def _check_training(document: dict[str, Any]) -> None:
    measured = document["measured"]
    assert (document["outcome"], measured["steps"], measured["ranks"]) == ("completed", STEPS, 2)
    assert measured["last_loss"] < measured["first_loss"] - 0.5
    assert measured["tokens_per_second"] == pytest.approx(16 * 64 / measured["step_seconds"])
    assert measured["peak_allocated_bytes"] > 0


def _check_memory(document: dict[str, Any]) -> None:
    """Memory is counted, not timed: a busy machine does not change it."""
    predicted = document["plan"]["memory"]["peak_allocated_bytes"]
    assert 0.85 < document["measured"]["peak_allocated_bytes"] / predicted < 1.15


@pytest.mark.slow
def test_live_plan(tmp_path: Path) -> None:
    database_path().unlink()
    document = _train("hf_trainer", tmp_path)
    _check_training(document)
    _check_memory(document)
    with open_store() as store:
        assert {rate.ranks for rate in store.rates()} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop", "deepspeed_loop"])
def test_live_plan_then_plan_file(name: str, tmp_path: Path) -> None:
    database_path().unlink()
    document = _train(name, tmp_path)
    _check_training(document)
    _check_memory(document)
    chosen = document["plan"]["plan"]
    assert (chosen["global_batch_size"], chosen["sequence_length"], chosen["precision"]) == (16, 64, "fp32")
    with open_store() as store:
        assert store.get(document["measurement_id"]).measured.last_loss == document["measured"]["last_loss"]
        assert {rate.ranks for rate in store.rates()} == {2}

    plan = load_plan(Path(document["run_directory"]) / "plan.yaml")
    other = replace(plan.configuration, micro_batch_size=2, gradient_accumulation_steps=4)
    save_plan(replace(plan, configuration=other), tmp_path / "other.yaml")
    again = _train(name, tmp_path, "--plan", tmp_path / "other.yaml")
    assert again["plan"]["plan"]["micro_batch_size"] == 2
    assert "the plan replaces" in again["stderr"]
    # The same samples make the same step, in whatever pieces they come: every script keeps its global batch.
    assert again["measured"]["samples_per_second"] == pytest.approx(16 / again["measured"]["step_seconds"])
    assert again["measured"]["first_loss"] == pytest.approx(document["measured"]["first_loss"], abs=0.05)
    assert again["measured"]["last_loss"] == pytest.approx(document["measured"]["last_loss"], abs=0.2)
    assert again["measured"]["peak_allocated_bytes"] < document["measured"]["peak_allocated_bytes"]


@pytest.mark.slow  # engine/test_planned.py trains the same script on a pool of ranks
def test_a_script_that_calls_dsplan(tmp_path: Path) -> None:
    document = _train("train_gpt", tmp_path, "--strategy", "fsdp")
    _check_training(document)
    assert document["plan"]["plan"]["strategy"] == "fsdp"


@pytest.mark.slow
def test_zero2_in_a_deepspeed_script(tmp_path: Path) -> None:
    document = _train("deepspeed_loop", tmp_path, "--strategy", "zero2")
    _check_training(document)
    _check_memory(document)
    assert document["plan"]["plan"]["strategy"] == "zero2"
    assert "zero_optimization stage 1 -> stage 2" in document["stderr"]
