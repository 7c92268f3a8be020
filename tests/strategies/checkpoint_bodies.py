"""Functions that the tests of checkpoints run on ranks."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from strategies.checkpoint import storage
from strategies.checkpoint.safefile import DTYPES
from strategies.errors import DsplanError
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe


def fill(engine: Any, value: float) -> None:
    """Put one number into every weight and every optimizer state."""
    with torch.no_grad():
        for tensor in _tensors(engine):
            tensor.fill_(value)


def values_of(engine: Any) -> set[float]:
    """The numbers in weights and states."""
    return {number for tensor in _tensors(engine) for number in tensor.detach().unique().tolist()}


def _tensors(engine: Any) -> list[torch.Tensor]:
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [*engine.module.parameters(), *states]


def full_disk_on_rank_1(recipe: Recipe, directory: str, asynchronous: bool) -> tuple[str, str, str]:
    """Return what is said when rank 1 cannot write, the latest checkpoint then, and the one saved afterwards."""
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    engine.save_checkpoint(directory)
    training_bodies.one_step(engine, 1)
    original, message = storage.write, ""

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    if engine.environment.rank == 1:
        storage.write = full  # type: ignore[assignment]
    try:
        engine.save_checkpoint(directory, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    except DsplanError as problem:
        message = str(problem)
    finally:
        storage.write = original
    latest = Path(directory, "latest").read_text().strip()
    torch.distributed.barrier()
    after = engine.save_checkpoint(directory)
    return message, latest, os.path.basename(after)


def save_after(recipe: Recipe, directory: str, steps: int) -> list[float]:
    """Train, save, and the losses of the next two steps."""
    engine = training_bodies.make_engine(recipe)
    for step in range(steps):
        training_bodies.one_step(engine, step)
    engine.save_checkpoint(directory, client_state={"at": steps})
    return [training_bodies.one_step(engine, step) for step in range(steps, steps + 2)]


def resume_each(recipe: Recipe, directories: list[str], steps: int) -> list[list[float]]:
    """For each checkpoint, the losses of two steps trained from it; all in one engine."""
    engine = training_bodies.make_engine(recipe)
    losses = []
    for directory in directories:
        path, state = engine.load_checkpoint(directory)
        assert path is not None
        assert state == {"at": steps}
        assert engine.global_steps == steps
        losses.append([training_bodies.one_step(engine, step) for step in range(steps, steps + 2)])
    return losses


def pass_on(recipe: Recipe, source: str, goal: str) -> None:
    """Load one checkpoint and save another, with nothing between."""
    engine = training_bodies.make_engine(recipe)
    engine.load_checkpoint(source)
    engine.save_checkpoint(goal)


def times_written(directory: Path) -> dict[str, float]:
    """Return how often the latest checkpoint holds the elements of each tensor but random states, on average."""
    folder = directory / (directory / "latest").read_text().strip()
    entries = json.loads((folder / "tensors.json").read_text()).items()
    return {
        name: sum(math.prod(box["sizes"]) for box in entry["boxes"]) / math.prod(entry["shape"])
        for name, entry in entries
        if not name.startswith("rng/")
    }


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the latest checkpoint but random states, whole, put together by hand."""
    folder = directory / (directory / "latest").read_text().strip()
    tensors, read = {}, cache(load_file)
    for name, entry in json.loads((folder / "tensors.json").read_text()).items():
        if not name.startswith("rng/"):
            whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            for box in entry["boxes"]:
                box_slices = tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"], strict=True))
                whole[box_slices] = read(folder / box["file"])[box["key"]]
            tensors[name] = whole
    return tensors


def random_numbers_after_saving(recipe: Recipe, directory: str) -> list[float]:
    """Numbers that this rank draws next, of states that differ between ranks."""
    engine = training_bodies.make_engine(recipe)
    torch.manual_seed(100 + engine.environment.rank)
    engine.save_checkpoint(directory)
    return torch.rand(3).tolist()


def random_numbers_after_loading(recipe: Recipe, directory: str) -> list[float]:
    engine = training_bodies.make_engine(recipe)
    torch.manual_seed(7)
    engine.load_checkpoint(directory)
    return torch.rand(3).tolist()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sixty samples, each its own number."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def _with_data(recipe: Recipe) -> Any:
    torch.manual_seed(1)
    engine, *_ = training_bodies.initialize(model=torch.nn.Linear(1, 1), plan=recipe.plan(), training_data=Numbers())
    return engine


def _two_steps(engine: Any) -> list[list[float]]:
    batches = []
    for step, batch in enumerate(engine.dataloader):
        batches.append(batch.flatten().tolist())
        engine.backward(engine(batch).mean())
        engine.step()
        if step == 1:
            break
    return batches


def batches_after_saving(recipe: Recipe, directory: str) -> list[list[float]]:
    """This rank's samples of the third and fourth step."""
    engine = _with_data(recipe)
    batches = iter(engine.dataloader)
    read = []
    for step in range(4):
        batch = next(batches)
        if step >= 2:
            read.append(batch.flatten().tolist())
        engine.backward(engine(batch).mean())
        engine.step()
        if step == 1:
            engine.save_checkpoint(directory)
    return read


def batches_after_loading(recipe: Recipe, directory: str) -> list[list[float]]:
    engine = _with_data(recipe)
    engine.load_checkpoint(directory)
    return _two_steps(engine)


def export_gpt2(recipe: Recipe, directory: str) -> dict[str, torch.Tensor]:
    """Export a small GPT-2 three ways; its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import dsplan

    torch.manual_seed(2)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    engine, *_ = training_bodies.initialize(model=model, plan=recipe.plan())
    top = Path(directory)
    engine.export(top / "whole")
    engine.export(top / "sharded", dtype="bf16", max_shard_bytes=4000)
    engine.save_checkpoint(top / "checkpoints")
    if engine.is_main:
        dsplan.export_checkpoint(top / "checkpoints", top / "from a checkpoint", dtype="bf16")
    torch.distributed.barrier()
    with engine.whole_parameters():
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def relayed(recipe: Recipe, source: str, goal: str) -> tuple[list[float], float, int, list[float]]:
    """Return what was loaded (else: is after two steps) of rates, scale and steps, and two losses; save `goal`."""
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    torch.manual_seed(3)
    engine, *_ = training_bodies.initialize(
        model=training_bodies.TinyModel(),
        plan=recipe.plan(),
        config={"scheduler": section, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
    )
    if source:
        engine.load_checkpoint(source)
    rates, scale, steps = engine.get_lr(), engine.loss_scale, engine.global_steps
    losses = [training_bodies.one_step(engine, step) for step in range(steps, steps + 2)]
    engine.save_checkpoint(goal)
    return (
        (rates, scale, steps, losses) if source else (engine.get_lr(), engine.loss_scale, engine.global_steps, losses)
    )
