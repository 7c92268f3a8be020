"""Functions that ranks run in the tests of an engine's conveniences."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from planner.emit.memory_picture import Timeline, draw
from planner.errors import NothingFits
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.engine.initialize import initialize
from strategies.errors import CannotRun
from strategies.supervision.failures import kind_of
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe

RATE = 2e-3


def engine_of(recipe: Recipe, config: dict[str, Any] | None = None, dataset: Any = None) -> Any:
    """An engine over the tiny model, with a config and a dataset."""
    torch.manual_seed(3)
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        training_data=dataset,
        plan=recipe.plan(),
        config=config,
    )
    return engine


def figures(recipe: Recipe) -> dict[str, Any]:
    """The figures of an engine after two steps."""
    engine = engine_of(recipe)
    losses = [training_bodies.one_step(engine, step) for step in range(2)]
    return {
        "own": isinstance(engine.module, training_bodies.TinyModel),
        "norm": engine.gradient_norm,
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale,
        "rates": engine.get_lr(),
        "losses": losses,
    }


def poisoned(recipe: Recipe) -> dict[str, Any]:
    """A step whose loss is infinite on one rank alone, and one after it."""
    engine = engine_of(recipe, {"fp16": {"enabled": True, "hysteresis": 1}} if recipe.precision == "fp16" else None)
    training_bodies.one_step(engine, 0)
    before, scale = training_bodies.whole_parameters(engine), engine.loss_scale
    ids, targets = (
        tensor[engine.environment.rank :: engine.environment.world_size] for tensor in training_bodies.batch_of(1)
    )
    loss = engine(ids, targets)
    engine.backward(loss * (math.inf if engine.environment.rank == 0 else 1.0))
    engine.step()
    after = training_bodies.whole_parameters(engine)
    outcome = {
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "norm": engine.gradient_norm,
        "skipped": engine.skipped_steps,
        "halved": engine.loss_scale / scale,
    }
    training_bodies.one_step(engine, 2)
    return {**outcome, "later norm": engine.gradient_norm, "later skips": engine.skipped_steps}


def accumulated_without_sync(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The weights after a step whose first micro-batches ran inside `no_sync`."""
    engine = engine_of(recipe)
    rank, world = engine.environment.rank, engine.environment.world_size
    ids, targets = (tensor[rank::world].chunk(recipe.accumulation) for tensor in training_bodies.batch_of(0))
    with engine.no_sync():
        for part in range(recipe.accumulation - 1):
            engine.backward(engine(ids[part], targets[part]))
            engine.step()
    engine.backward(engine(ids[-1], targets[-1]))
    engine.step()
    return training_bodies.whole_parameters(engine)


class Product(torch.nn.Module):
    """A parameter whose gradient is the input, [8]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def summed_gradient(recipe: Recipe, dtype: str) -> float:
    """Return how far SGD moves a bf16 weight whose gradient is 1 in one micro-batch and 1/512 in each other one."""
    micro_batches = recipe.accumulation
    engine, *_ = initialize(
        model=Product(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        plan=recipe.plan(),
        config={"data_types": {"grad_accum_dtype": dtype}},
    )
    for micro_batch in range(micro_batches):
        size = micro_batches * (1.0 if micro_batch == 0 else 1 / 512)
        engine.backward(engine(torch.full((8,), size, dtype=torch.bfloat16)))
        engine.step()
    with engine.whole_parameters():
        return 1.0 - engine.module.weight[0].item()


def changed_weights(recipe: Recipe) -> dict[str, Any]:
    """Return what rank 0 writes to one element of a weight, on every rank, before and after another step."""
    engine = engine_of(recipe)
    training_bodies.one_step(engine, 0)
    name, batch = "blocks.1.up.weight", training_bodies.batch_of(1)
    with engine.whole_parameters():
        before = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
        engine.eval()
        with torch.no_grad():
            # One rank alone: nothing inside may wait for the others, as DeepSpeed's stage 3 does in any case.
            if engine.is_main or engine.configuration.backend == "deepspeed":
                engine.module(*batch)
        engine.train()
    with engine.whole_parameters(keeps_changes=True):
        weight = dict(engine.module.named_parameters())[name]
        with torch.no_grad():
            weight[3, 5] = 0.5 + engine.environment.rank
    with engine.whole_parameters():
        after = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
    training_bodies.one_step(engine, 1)
    with engine.whole_parameters():
        later = dict(engine.module.named_parameters())[name][3, 5].item()
    differs = {key: int((before[key] != after[key]).sum()) for key in before}
    return {"value": after[name][3, 5].item(), "differs": differs, "later": later, "size": before[name].numel()}


def gpt2_tokens(recipe: Recipe, inside: bool) -> tuple[float, list[list[int]]]:
    """The evaluation loss and the tokens that a tiny GPT-2 generates after three steps of training."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    settings = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 31}
    model = GPT2LMHeadModel(
        GPT2Config(**settings, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=30)
    )
    engine, *_ = initialize(
        model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), plan=recipe.plan()
    )
    for step in range(3):
        ids = training_bodies.batch_of(step)[0][engine.environment.rank :: engine.environment.world_size]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.eval()
    prompt = training_bodies.batch_of(0)[0][:2]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 30}
    with torch.no_grad():
        loss = engine(input_ids=prompt, labels=prompt).loss.item()
        if inside:
            with engine.whole_parameters():
                tokens = engine.module.generate(prompt, **options)
        else:
            tokens = engine.module.generate(prompt, **options)
    return loss, tokens.tolist()


def report(recipe: Recipe) -> tuple[dict[str, int], str, int]:
    """The live bytes of every category after three steps, the report as text, and the model's elements."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}}
    engine = engine_of(recipe, {"zero_optimization": zero} if recipe.offload == "nvme" else None)
    for step in range(3):
        training_bodies.one_step(engine, step)
    summary = engine.memory_report()
    elements = sum(math.prod(shape) for shape in shapes())
    return {row.name: row.live_bytes for row in summary.rows}, str(summary), elements


def shapes() -> list[torch.Size]:
    return [parameter.shape for parameter in training_bodies.TinyModel().parameters()]


def timeline(recipe: Recipe, folder: str) -> tuple[int, int, list[tuple[int, ...]]]:
    """Draw a step after three others; the peak it counted, that of the report after it, and the layers over time."""
    engine = engine_of(recipe)
    for step in range(3):
        training_bodies.one_step(engine, step)
    drawn: list[Timeline] = []

    def noting(timeline: Timeline) -> str:
        drawn.append(timeline)
        return draw(timeline)

    with (
        mock.patch("strategies.telemetry.memory_timeline.draw", noting),
        engine.memory_timeline(Path(folder, f"{engine.environment.rank}.svg")),
    ):
        training_bodies.one_step(engine, 3)
    return engine.counted_peak_bytes, engine.memory_report().peak_bytes, [sample.layers for sample in drawn[0].samples]


def logged(recipe: Recipe, folder: str) -> list[float]:
    """Train six steps with every log on; the losses of this rank."""
    config = {
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "events"},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "tables"},
        "profiler": {"enabled": True, "wait": 0, "warmup": 1, "active": 1, "output_path": str(Path(folder, "traces"))},
        "wall_clock_breakdown": True,
        "steps_per_print": 3,
    }
    engine = engine_of(recipe, config)
    losses = []
    for step in range(6):
        with engine.profile("preparing"):
            ids, targets = (
                t[engine.environment.rank :: engine.environment.world_size] for t in training_bodies.batch_of(step)
            )
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


def models_that_differ(recipe: Recipe, how: str, odd: int) -> tuple[str, float]:
    """Return what is said where one rank builds another model, and the seconds until then."""
    torch.manual_seed(3)
    model = training_bodies.TinyModel()
    if dist.get_rank() == odd:
        DIFFERENCES[how](model)
    begun = time.monotonic()
    try:
        initialize(model=model, plan=recipe.plan())
    except CannotRun as refusal:
        return str(refusal), time.monotonic() - begun
    return "trains", time.monotonic() - begun


def _reshape(model: training_bodies.TinyModel) -> None:
    model.positions = torch.nn.Parameter(torch.zeros(training_bodies.LENGTH + 1, training_bodies.WIDTH))


def _rename(model: training_bodies.TinyModel) -> None:
    model.layers = model._modules.pop("blocks")


DIFFERENCES: dict[str, Callable[[training_bodies.TinyModel], object]] = {
    "none": lambda model: None,
    "shape": _reshape,
    "dtype": lambda model: setattr(model.positions, "data", model.positions.data.to(torch.bfloat16)),
    "name": _rename,
    "more": lambda model: setattr(model, "more", torch.nn.Linear(2, 2)),
    "frozen": lambda model: model.positions.requires_grad_(False),
    "buffer": lambda model: model.register_buffer("mask", torch.ones(3)),
}


def kinds_of_a_joint_failure() -> list[tuple[str, str]]:
    """Return a rank's last word of a plan that rank 0 does not find, and of a bug of rank 1: kind and message."""

    def nothing() -> None:
        raise NothingFits("no plan fits this machine")

    def bug() -> None:
        if dist.get_rank() == 1:
            raise KeyError("gone")

    kinds = []
    for fails in (lambda: on_rank_zero(nothing), lambda: everywhere(bug)):
        try:
            fails()
        except Exception as error:
            kinds.append((kind_of(error), str(error)))
    return kinds
