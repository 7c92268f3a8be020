"""The runs that the contract of all strategies compares bf16 with, and a step that overflows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from planner.vocabulary import ZERO_STAGES
from strategies.engine.initialize import initialize
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe, TinyModel, Trained

LEARNING_RATE = 2e-3


def _start() -> TinyModel:
    torch.manual_seed(3)
    return TinyModel()


def start() -> dict[str, torch.Tensor]:
    """The weights that every run begins with."""
    return {name: parameter.detach().clone() for name, parameter in _start().named_parameters()}


def reference_in_bf16(recipe: Recipe) -> Trained:
    """Plain torch in one process with the arithmetic that bf16 means under the recipe's strategy.

    Autocast over fp32 weights for `single` and `ddp`. Else weights and gradients are bf16, gradients of micro-batches
    and ranks are added up in fp32, and AdamW changes fp32 masters, which DeepSpeed makes of weights already rounded.
    """
    alike = replace(recipe, strategy="", backend="", dp_replicate=0)
    if recipe.strategy in ("single", "ddp"):
        return _autocast_reference(alike)
    return _masters_reference(alike, starts_rounded=not recipe.backend and recipe.strategy in ZERO_STAGES)


@cache
def _autocast_reference(recipe: Recipe) -> Trained:
    model = _start()
    return _trained(model, list(model.parameters()), recipe, autocasts=True)


@cache
def _masters_reference(recipe: Recipe, *, starts_rounded: bool) -> Trained:
    model = _start()
    if starts_rounded:
        model.bfloat16().float()
    masters = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    return _trained(model.bfloat16(), masters, recipe, autocasts=False)


def _trained(model: TinyModel, masters: list[Any], recipe: Recipe, *, autocasts: bool) -> Trained:
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    weights, losses = list(model.parameters()), []
    for step in range(recipe.steps):
        losses.append(_add_gradients(model, masters, _micro_batches(recipe, step), autocasts=autocasts))
        if recipe.clipping:
            nn.utils.clip_grad_norm_(masters, recipe.clipping)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    return Trained(losses=losses, parameters={n: m.detach().clone() for n, m in zip(names, masters, strict=True)})


def _micro_batches(recipe: Recipe, step: int) -> list[tuple[torch.Tensor, ...]]:
    """The step's micro-batches, of all ranks."""
    batch, world = training_bodies.batch_of(step, recipe.global_batch), recipe.world_size
    return [
        micro
        for rank in range(world)
        for micro in zip(*[tensor[rank::world].chunk(recipe.accumulation) for tensor in batch], strict=True)
    ]


def _add_gradients(model: TinyModel, masters: list[Any], batches: list[Any], *, autocasts: bool) -> float:
    """Put the mean gradient of the micro-batches on the masters; their mean loss."""
    total = 0.0
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocasts else nullcontext():
            loss = model(*batch) / len(batches)
        for master, gradient in zip(masters, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            master.grad = gradient.float() if master.grad is None else master.grad + gradient
        total += loss.item()
    return total


class Poisonable(TinyModel):
    """TinyModel whose loss can be made to have an infinite gradient at one element of one parameter."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, poison: bool = False) -> torch.Tensor:
        loss = super().forward(ids, targets)
        return loss + self.positions[0, 0] * torch.inf if poison else loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """The view of a rank on training whose first step overflows on rank 1: entries per step, from the start on."""

    scales: list[float]
    skipped: list[int]
    rates: list[float]
    losses: list[float]
    stayed: bool
    parameters: dict[str, torch.Tensor]


def overflow_on_rank_1(recipe: Recipe) -> Overflow:
    """Train in fp16 with a first micro-batch that overflows on rank 1, at an element that rank 0 owns."""
    torch.manual_seed(3)
    engine, _, _, scheduler = initialize(
        model=Poisonable(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9),
        plan=recipe.plan(),
        config={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 4}},
    )
    assert scheduler is not None
    before, after = training_bodies.whole_parameters(engine), dict[str, torch.Tensor]()
    scales, skipped, rates, losses = [engine.loss_scale], [0], [LEARNING_RATE], list[float]()
    for step in range(recipe.steps):
        losses.append(training_bodies.one_step(engine, step, poisons=step == 0 and engine.environment.rank == 1))
        scales.append(engine.loss_scale)
        skipped.append(engine.skipped_steps)
        rates.append(engine.optimizer.param_groups[0]["lr"])
        after = after or training_bodies.whole_parameters(engine)
    return Overflow(
        scales=scales,
        skipped=skipped,
        rates=rates,
        losses=losses,
        stayed=all(torch.equal(before[name], after[name]) for name in before),
        parameters=training_bodies.whole_parameters(engine),
    )


def reference_without_the_first_step(recipe: Recipe) -> list[float]:
    """Losses of plain torch in fp32 that looks at the first batch and learns from the others."""
    model = _start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    losses = []
    for step in range(recipe.steps):
        loss = model(*training_bodies.batch_of(step, recipe.global_batch))
        losses.append(loss.item())
        if step > 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses
