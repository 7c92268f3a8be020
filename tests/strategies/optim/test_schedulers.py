"""Schedules by name have the rates of DeepSpeed's own classes, step by step, and resume where they were."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hardware_db.errors import DsplanError
from strategies.config.values import NamedParts
from strategies.optim.registry import scheduler_by_name

STEPS = 40
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}


@pytest.fixture(scope="module")
def deepspeeds() -> Iterator[Any]:
    """DeepSpeed's module of schedules, which warns of the first step of every schedule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed")
        from deepspeed.runtime import lr_schedules

        before = lr_schedules.logger.level
        lr_schedules.logger.setLevel(logging.ERROR)
        yield lr_schedules
        lr_schedules.logger.setLevel(before)


def optimizer_of_two_groups() -> torch.optim.Optimizer:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.1)


def settings_over_steps(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = STEPS) -> list[float]:
    """Rate and first beta of both groups in every step."""
    seen = []
    for _ in range(steps):
        seen += [float(group["lr"]) for group in optimizer.param_groups]
        seen += [float(beta) for group in optimizer.param_groups for beta in group["betas"]]
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 9}),
        ("WarmupLR", {"warmup_num_steps": 1}),
        (
            "WarmupLR",
            {"warmup_num_steps": 7, "warmup_min_lr": 0.01, "warmup_max_lr": [0.2, 0.3], "warmup_type": "linear"},
        ),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 20}),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 4, "warmup_type": "linear"}),
        ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 20}),
        (
            "WarmupCosineLR",
            {
                "warmup_num_steps": 5,
                "total_num_steps": 20,
                "warmup_min_ratio": 0.1,
                "cos_min_ratio": 0.2,
                "warmup_type": "linear",
            },
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 4}),
        ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 4}),
        (
            "OneCycle",
            {
                **CYCLE,
                "cycle_first_step_size": 5,
                "cycle_second_step_size": 3,
                "cycle_first_stair_count": 2,
                "cycle_second_stair_count": 3,
                "decay_step_size": 4,
                "decay_lr_rate": 0.5,
                "decay_mom_rate": 0.1,
            },
        ),
        (
            "OneCycle",
            {
                **CYCLE,
                "cycle_first_step_size": 5,
                "cycle_second_step_size": 0,
                "cycle_min_mom": 0.7,
                "decay_step_size": 2,
            },
        ),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 1.5, "decay_step_size": 2, "decay_lr_rate": 1.0}),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 3, "cycle_momentum": False}),
    ],
)
def test_rates_are_deepspeeds(deepspeeds: Any, name: str, params: Mapping[str, Any]) -> None:
    theirs, ours = optimizer_of_two_groups(), optimizer_of_two_groups()
    expected = settings_over_steps(theirs, getattr(deepspeeds, name)(theirs, **params))
    seen = settings_over_steps(ours, scheduler_by_name(NamedParts(name=name, params=params))(ours))
    assert seen == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert len(set(seen)) > 4


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("warmup_lr", {"warmup_num_steps": 9}),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 7, "decay_step_size": 3, "decay_lr_rate": 0.2}),
        ("cosine", {"total_num_steps": 20, "warmup_num_steps": 4}),
        ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 4}),
        ("StepLR", {"step_size": 5}),
    ],
)
def test_a_schedule_resumes_where_it_was(name: str, params: Mapping[str, Any]) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = optimizer_of_two_groups()
        return optimizer, scheduler_by_name(NamedParts(name=name, params=params))(optimizer)

    through = settings_over_steps(*make())
    first, scheduler = make()
    half = settings_over_steps(first, scheduler, STEPS // 2)
    state = json.loads(json.dumps([first.state_dict()["param_groups"], scheduler.state_dict()]))
    later, resumed = make()
    later.load_state_dict({"state": {}, "param_groups": state[0]})
    resumed.load_state_dict(state[1])
    assert half + settings_over_steps(later, resumed, STEPS // 2) == pytest.approx(through, rel=1e-12)


def test_linear_cosine_and_constant_have_their_formulas() -> None:
    def rates(name: str, **params: Any) -> list[float]:
        optimizer = optimizer_of_two_groups()
        scheduler = scheduler_by_name(NamedParts(name=name, params=params))(optimizer)
        return [settings_over_steps(optimizer, scheduler, 1)[0] for _ in range(12)]

    up = [0.0, 0.025, 0.05, 0.075]
    assert rates("constant", warmup_num_steps=4) == pytest.approx(up + [0.1] * 8)
    down = [0.1 * (1 - step / 6) for step in range(7)]
    assert rates("linear", warmup_num_steps=4, total_num_steps=10) == pytest.approx([*up, *down, 0.0], abs=1e-12)
    assert rates("linear", total_num_steps=2, min_ratio=0.5) == pytest.approx([0.1, 0.075] + [0.05] * 10)
    cosine = rates("cosine", warmup_num_steps=4, total_num_steps=10)
    assert [cosine[step] for step in (4, 7, 10, 11)] == pytest.approx([0.1, 0.05, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("Warmup", {}, "scheduler Warmup is not known; did you mean WarmupLR?"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing; WarmupDecayLR needs it"),
        (
            "OneCycle",
            {**CYCLE, "cycle_max_lrs": 1},
            "params.cycle_max_lrs is not known to OneCycle; did you mean cycle_max_lr",
        ),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type is 'cubic'; it must be log or linear"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0; it must be a whole number of at least 1"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, "warmup_max_lr has 1 values for 2 parameter groups"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "goes up for 0 steps"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "mode": "x"}, "CyclicLR refuses its params: mode is invalid"),
    ],
)
def test_schedules_that_cannot_be_made(name: str, params: Mapping[str, Any], words: str) -> None:
    with pytest.raises(DsplanError) as caught:
        scheduler_by_name(NamedParts(name=name, params=params))(optimizer_of_two_groups())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
