"""Functions that the tests of activation checkpointing run on ranks."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardware_db.probe import probe
from planner.cluster.resolve import probed_cluster
from strategies.engine.initialize import initialize
from strategies.modules.activation_checkpointing import checkpoint_activations
from strategies.tracing.module_trace import trace_activations
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Block, Recipe

CHOICES = {"blocks": Block, "linears": nn.Linear, "the stack": nn.Sequential}
SAMPLES, LENGTH, WIDTH = 6, 64, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The modules that recompute, and how; None for none."""

    modules: str | None = None
    policy: str = "full"
    on_host: bool = False

    def apply(self, model: nn.Module) -> None:
        if self.modules is not None:
            kind = CHOICES[self.modules]
            checkpoint_activations(model, lambda m: isinstance(m, kind), policy=self.policy, on_host=self.on_host)


class Stacked(training_bodies.TinyModel):
    """The tiny model with its blocks in a module that can be run as a whole."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = nn.Sequential(*self.blocks)
        self.blocks = blocks

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embedding(ids) + self.positions)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def train_choosing(recipe: Recipe, choice: Choice) -> training_bodies.Trained:
    """Train the tiny model, some of whose modules recompute."""
    torch.manual_seed(3)
    model = Stacked()
    choice.apply(model)
    engine, *_ = initialize(
        model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3), plan=recipe.plan()
    )
    losses = [training_bodies.one_step(engine, step) for step in range(recipe.steps)]
    return training_bodies.Trained(losses=losses, parameters=training_bodies.whole_parameters(engine))


class Activated(nn.Module):
    """Blocks whose activations are larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def kept_by_forward(recipe: Recipe, choice: Choice) -> int:
    """Live bytes that a forward pass adds on this rank, the least of three: a message that ends late holds its tensors
    for a moment more."""
    engine, x = _engine(recipe, choice), torch.zeros(SAMPLES, LENGTH, WIDTH)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    gc.collect()  # or what earlier bodies left is freed while this is counted
    kept = []
    with StorageTracker([*engine.module.parameters(), x]) as tracker:
        for _ in range(3):
            before = tracker.live_bytes
            loss = engine(x)
            kept.append(tracker.live_bytes - before)
            engine.backward(loss)
            del loss
            engine.step()
    return min(kept)


def _engine(recipe: Recipe, choice: Choice) -> Any:
    model = Activated()
    choice.apply(model)
    engine, *_ = initialize(
        model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan=recipe.plan()
    )
    return engine


def traced_keeping(choice: Choice) -> float:
    """Return what the planner's trace of such a model says that its forward pass keeps."""
    model = Activated()
    choice.apply(model)
    traces = trace_activations(
        model, lambda n: (torch.zeros(n, LENGTH, WIDTH),), "fp32", probed_cluster(probe(), ranks=1).device
    )
    return SAMPLES * traces["fp32"].kept
