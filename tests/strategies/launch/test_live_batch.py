"""The global batch of a script that does not call dsplan, in a run that resumes with other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strategies.launch.hooks import script_plan
from strategies.run_directory.resume_state import ResumeState


@pytest.mark.parametrize(
    ("kept", "accumulates", "expected"), [(None, True, 12), (24, True, 24), (None, False, 12), (24, False, 12)]
)
def test_the_batch_is_kept_where_the_script_can_accumulate(
    kept: int | None,
    accumulates: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script_plan, "current", lambda: ResumeState(ranks=3, is_resumed=True, global_batch_size=kept))
    job = script_plan.LiveJob(
        module=nn.Linear(1, 1),
        kind="accelerate",
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="adamw",
        accumulates=accumulates,
    )
    assert script_plan._global_batch(job, 3) == expected
    printed = capsys.readouterr().out
    assert ("does not accumulate gradients: 3 ranks train on 12 samples a step, not on 24" in printed) is (
        kept == 24 and not accumulates
    )


class Images(nn.Module):
    """Knows images only: its labels belong to the loss that the script computes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(images).mean((2, 3))  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "example", "length", "planned", "task"),
    [
        (Images(), [torch.zeros(3, 3, 20, 20), torch.zeros(3)], None, 1, "custom"),
        (Images(), ((torch.zeros(3, 3, 20, 20),), {}), None, 1, "custom"),
        (Words(), torch.zeros(3, 40, dtype=torch.long), None, 40, "causal-lm"),
        (Words(), torch.zeros(3, 40, dtype=torch.long), 64, 64, "causal-lm"),
    ],
)
def test_a_plan_is_made_of_a_batch_of_the_scripts_own(
    module: nn.Module,
    example: Any,
    length: int | None,
    planned: int,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    job = script_plan.LiveJob(
        module=module,
        kind="accelerate",
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        sequence_length=length,
        example=example,
        precision="fp32",
        optimizer="adamw",
        fixed_batch=True,
    )
    plan = script_plan._plan(job, ())
    assert (plan.configuration.sequence_length, plan.workload["task"]) == (planned, task)
    assert plan.provenance["memory"] == "traced"


def _pads(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {"input_ids": torch.zeros(len(samples), longest + 2, dtype=torch.long)}


def _cannot_take_text(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize(("collate", "tokens"), [(None, 5), (_pads, 7), (_cannot_take_text, 5)])
def test_tokens_are_counted_although_a_collator_cannot_take_the_samples_as_they_are(collate: Any, tokens: int) -> None:
    """Trainer drops the columns that a model does not take before its collator sees them."""
    samples = [{"text": "a", "input_ids": [1, 2, 3]}, {"text": "b", "input_ids": [1, 2, 3, 4, 5]}]
    assert script_plan.sequence_length(samples, collate) == tokens
