"""Engines whose weights are read from files, against engines that had them: what ranks of the pools run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

import dsplan
from strategies.engine.initialize import initialize
from tests.strategies import parallel_bodies, training_bodies
from tests.strategies.parallel_bodies import Composition, Difference, Kind
from tests.strategies.training_bodies import Recipe


def write(kind: Kind, folder: Path) -> None:
    """Write the weights of a model as the Hub has them: in several files where transformers writes them."""
    model: Any = parallel_bodies.build(kind)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, max_shard_size="30KB")
    else:
        folder.mkdir(exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))


def train(kind: Kind, composition: Composition, folder: str) -> Difference:
    """Train from weights in files, and compare with one process that has them."""
    with dsplan.empty_weights():
        model = parallel_bodies.build(kind)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(1)
    engine, *_ = initialize(model, optimizer=parallel_bodies._optimizer, plan=composition.plan(), weights=folder)
    return parallel_bodies.compared(engine, kind, composition)


def train_tiny(recipe: Recipe, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and whole weights of a recipe whose model is read from files."""
    with dsplan.empty_weights():
        model = training_bodies.TinyModel(frozen=recipe.frozen)
    engine, *_ = initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=recipe.plan(),
        config={"weights": folder},
    )
    losses = [training_bodies.one_step(engine, step) for step in range(recipe.steps)]
    return losses, training_bodies.whole_parameters(engine)


def write_tiny(folder: Path, *, frozen: bool = False) -> None:
    """Write the model that recipes begin with, the position table included."""
    torch.manual_seed(3)
    folder.mkdir(exist_ok=True)
    model: nn.Module = training_bodies.TinyModel(frozen=frozen)
    save_model(model, str(folder / "model.safetensors"))
