"""Training by what a config names, on ranks and in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

import dsplan
from hardware_db.probe import probe
from strategies.autoplan import live
from strategies.config.read import read_config
from strategies.engine.initialize import initialize
from strategies.optim.muon import muon_groups
from strategies.optim.registry import optimizer_by_name, scheduler_by_name
from tests.strategies.training_bodies import Recipe, TinyModel, Trained, batch_of, one_step, whole_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ByConfig:
    """The results of a run, where it began, and the rate of the first group in every step."""

    trained: Trained
    rates: list[float]
    start: dict[str, torch.Tensor] = field(default_factory=dict)


class PlainDescent(torch.optim.Optimizer):
    """A script's own optimizer, element by element."""

    whole_tensors = False

    def __init__(self, params: Iterable[Any], rate: float) -> None:
        super().__init__(params, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


def halving(optimizer: torch.optim.Optimizer, every: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A script's own schedule."""
    return torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)


def register() -> None:
    dsplan.register_optimizer("Plain-Descent", PlainDescent)
    dsplan.register_scheduler("halving", halving)


def train_by_config(recipe: Recipe, config: Mapping[str, Any]) -> ByConfig:
    register()
    torch.manual_seed(3)
    engine, optimizer, _, _ = initialize(model=TinyModel(), plan=recipe.plan(), config=config)
    losses, rates = [], []
    for step in range(recipe.steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        losses.append(one_step(engine, step))
    return ByConfig(trained=Trained(losses=losses, parameters=whole_parameters(engine)), rates=rates)


def plain_by_config(recipe: Recipe, config: Mapping[str, Any]) -> ByConfig:
    """The same in one process without an engine."""
    register()
    torch.manual_seed(3)
    model, script = TinyModel(), read_config(config)
    assert script.optimizer is not None
    groups = muon_groups(model, None) if script.optimizer.name == "Muon" else list(model.parameters())
    optimizer = optimizer_by_name(script.optimizer)(groups)
    scheduler = scheduler_by_name(script.scheduler)(optimizer) if script.scheduler else None
    losses, rates = [], []
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(recipe.steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = model(*batch_of(step, recipe.global_batch))
        loss.backward()
        if script.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), script.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return ByConfig(trained=Trained(losses=losses, parameters=parameters), rates=rates, start=start)


def refusal_of(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """Return what `initialize` says of a config that it refuses; empty where it does not."""
    try:
        initialize(model=TinyModel(), plan=recipe.plan(), config=config)
    except dsplan.DsplanError as problem:
        return str(problem)
    return ""


def planned_on_avx2(config: Mapping[str, Any], backend: Any) -> str:
    """The backend of the plan that is made for a processor with AVX2 at most, or why there is none."""
    machine = probe()
    machine = replace(machine, host=replace(machine.host, cpu_flags=frozenset({"avx", "avx2", "fma"})))
    with mock.patch.object(live, "own_machine", return_value=machine):
        try:
            engine, *_ = initialize(model=TinyModel(), config=config, backend=backend)
        except dsplan.DsplanError as problem:
            return str(problem)
    one_step(engine, 0)
    return str(engine.configuration.backend)


def refusal_on_a_device_without(precision: str, recipe: Recipe) -> str:
    """Return what `initialize` says of a plan in a precision that DeepSpeed's accelerator has not got."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(get_accelerator(), f"is_{precision}_supported", return_value=False):
        return refusal_of(replace(recipe, precision=precision), {})
