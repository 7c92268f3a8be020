"""`dsplan.integrations.TrainerCallback`: what it predicts, measures, reports and stores of a Trainer without dsplan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.integrations import TrainerCallback
from hardware_db.store import open_store
from strategies.launch.hooks.script_plan import sequence_length
from strategies.telemetry.metrics import summarise

transformers = pytest.importorskip("transformers")


class _Poison(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes a weight NaN after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            next(kwargs["model"].parameters()).data.fill_(float("nan"))


def _trained(folder: Path, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, bos_token_id=None, eos_token_id=None, n_embd=16, n_layer=1, n_head=1, n_positions=32
    )
    # 28 samples in micro-batches of 2, three to a step: the last step has two.
    rows = torch.randint(0, 64, (28, 16))
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def test_a_trainer_is_predicted_measured_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = TrainerCallback()
    logged = [row["loss"] for row in _trained(tmp_path, watching).state.log_history if "loss" in row]
    plan, measured = watching.plan, watching.measured
    assert plan is not None
    assert measured is not None
    assert (plan.configuration.strategy, plan.configuration.micro_batch_size, plan.configuration.sequence_length) == (
        "single",
        2,
        16,
    )
    assert (measured.steps, len(logged)) == (5, 5)
    # The last step has fewer micro-batches than the others.
    assert (measured.first_loss, measured.last_loss) == pytest.approx((logged[0], logged[-1]), abs=1e-4)
    assert measured.peak_allocated_bytes == pytest.approx(plan.memory.peak_allocated_bytes, rel=0.1)
    assert "predicted and measured: peak memory of a rank" in capsys.readouterr().out
    with open_store() as store:
        stored = store.get(watching.stored.split()[2])
    assert (stored.strategy, stored.measured.steps, stored.outcome) == ("single", 5, "completed")


def test_a_loss_that_is_not_finite_is_an_alert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = TrainerCallback(store=False)
    _trained(tmp_path, watching, _Poison())
    assert "not_finite" in [alert.kind for alert in watching.alerts]
    assert "dsplan: rank 0: loss is nan" in capsys.readouterr().out
    assert watching.stored == "not stored: store=False"


def test_the_loss_of_a_run_is_the_mean_over_its_ranks() -> None:
    rows = [
        [
            {"event": "step", "step": step, "global_step": step + 1, "loss": loss + rank, "seconds": 1.0}
            for step, loss in enumerate((5.0, 4.0))
        ]
        for rank in (0, 1)
    ]
    silent = [{"event": "step", "step": 0, "global_step": 1, "loss": None, "seconds": 1.0}]
    summary = summarise([*rows, silent])
    assert (summary.first_loss, summary.last_loss) == (5.5, 4.5)


def test_samples_that_a_collator_packs_are_counted_one_by_one() -> None:
    samples = [{"input_ids": torch.ones(24, dtype=torch.int64)}] * 4

    def pack(batch: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.cat([sample["input_ids"] for sample in batch])[None]}

    def pad(batch: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack([sample["input_ids"] for sample in batch])}

    assert (sequence_length(samples, pack), sequence_length(samples, pad)) == (24, 24)
