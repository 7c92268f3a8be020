"""Engines whose weights are read from files, against engines that had them: what ranks of the pools run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import nn

import dsplan
from scripts.measure.streaming import free_memory, sampled_peak
from strategies.engine.initialize import initialize
from strategies.telemetry.machine import ProcessMemory
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


def save_and_export(recipe: Recipe, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """Save and export a trained model; its whole weights, and the loss of the first batch with them."""
    engine = training_bodies.make_engine(recipe)
    for step in range(recipe.steps):
        training_bodies.one_step(engine, step)
    engine.save_checkpoint(Path(folder, "checkpoint"))
    engine.export(Path(folder, "export"), dtype="bf16")
    return training_bodies.whole_parameters(engine), training_bodies.one_step(engine, 0)


class Wide(nn.Module):
    """Blocks of 4 MB in bf16, 48 of them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(1448, 1448, bias=False), nn.ReLU()) for _ in range(48)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def host_peak(strategy: str, folder: str) -> int:
    """Anonymous bytes that reading `Wide` in bf16 takes on this rank at most."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with dsplan.empty_weights():
            model = Wide()
        if torch.distributed.get_rank() == 0:
            values = {name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}
            save_file(values, Path(folder, "model.safetensors"))
            del values
    finally:
        torch.set_default_dtype(usual)
    torch.distributed.barrier()
    recipe = Recipe(strategy=strategy, backend="native" if strategy == "zero3" else "torch", world_size=2)
    plan = replace(recipe, precision="bf16-pure").plan()
    free_memory()
    before = ProcessMemory().read()["private_bytes"]
    with sampled_peak() as peak:
        engine, *_ = initialize(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan, weights=folder)
    assert engine is not None
    return peak() - before


def train_adapted(recipe: Recipe, folder: str, method: str) -> tuple[list[float], list[float]]:
    """Losses of adapters beside weights that are read, and beside the same weights that the model has."""
    both = []
    for reads in (True, False):
        torch.manual_seed(3)
        with dsplan.empty_weights() if reads else nullcontext():
            model = training_bodies.TinyModel()
        torch.manual_seed(4)
        config = {"lora": {"method": method, "rank": 4}} | ({"weights": folder} if reads else {})
        engine, *_ = initialize(
            model, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-2), plan=recipe.plan(), config=config
        )
        both.append([training_bodies.one_step(engine, step) for step in range(recipe.steps)])
    return both[0], both[1]
