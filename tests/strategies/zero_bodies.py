"""Functions that the tests of our own ZeRO run on ranks, over a model that has everything that is awkward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from strategies.backends.zero.gradient_reducer import Reducer
from strategies.engine.initialize import initialize
from strategies.telemetry.memory_report import reachable_tensors
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe

BATCH = 12
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.002, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


class OddBlock(nn.Module):
    """Widths that divide by nothing, a convolution, a scalar, and a branch that every third sample leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 13)
        self.outer = nn.Linear(13, 7, bias=False)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.rare = nn.Parameter(torch.full((5, 7), 0.1))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        y = self.outer(torch.tanh(self.inner(x)))
        y = y + self.gain * self.convolution(y.unsqueeze(1)).squeeze(1)
        return x + y + self.rare.sum(0) if uses_rare else x + y


class OddModel(nn.Module):
    """Blocks between tied ends, with a frozen scale, a double-precision offset, a buffer and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 7, bias=False)
        self.blocks = nn.ModuleList([OddBlock() for _ in range(3)])
        self.blocks[2].outer.weight = self.blocks[0].outer.weight
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0]), requires_grad=False)
        self.offset = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.register_buffer("mean", torch.full((7,), 0.25))

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        hidden = self.enter(x) * self.scale + self.mean
        for block in self.blocks:
            hidden = block(hidden, uses_rare)
        out = functional.linear(hidden, self.enter.weight.t())  # the entrance again, as the way out
        return (out.double() + self.offset).square().mean(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OddRecipe:
    """One way to train OddModel for six steps; in steps 0 and 3 no sample uses the rare branch, else rank 0's do."""

    strategy: str = "zero2"
    optimizer: str = "sgd"
    world_size: int = 2
    steps: int = 6
    is_built: bool = False

    def plan(self) -> Any:
        return Recipe(strategy=self.strategy, backend="native", world_size=self.world_size).plan()


def _batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))


def _loss(model: Any, x: torch.Tensor, step: int, *, is_first: bool) -> torch.Tensor:
    losses: torch.Tensor = model(x, is_first and step % 3 > 0)
    return losses.sum() / BATCH


def train_odd(recipe: OddRecipe) -> dict[str, torch.Tensor]:
    """Every parameter after training over ranks; each rank has a run of the batch."""
    torch.manual_seed(5)
    model, make = OddModel(), OPTIMIZERS[recipe.optimizer]
    optimizer = make(list(model.parameters())) if recipe.is_built else make
    engine, optimizer, _, scheduler = initialize(
        model=model,
        optimizer=optimizer,
        plan=recipe.plan(),
        lr_scheduler=lambda wrapped: torch.optim.lr_scheduler.StepLR(wrapped, step_size=2, gamma=0.5),
    )
    rank, world = engine.environment.rank, engine.environment.world_size
    for step in range(recipe.steps):
        part = _batch(step).chunk(world)[rank]
        engine.backward(_loss(engine, part, step, is_first=rank == 0) * world)
        engine.step()
    assert scheduler is not None
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    return training_bodies.whole_parameters(engine)


def reference_odd(recipe: OddRecipe) -> dict[str, torch.Tensor]:
    """The same training in one process, rank by rank."""
    torch.manual_seed(5)
    model = OddModel()
    optimizer = OPTIMIZERS[recipe.optimizer](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(recipe.steps):
        for rank, part in enumerate(_batch(step).chunk(recipe.world_size)):
            _loss(model, part, step, is_first=rank == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


@contextmanager
def _sent(engine: Any) -> Iterator[list[int]]:
    """The number of elements in every reduction that is begun."""
    collectives, sizes = engine._context.collectives, list[int]()
    original = collectives.reduce_scatter

    def counting(buffer: torch.Tensor, layout: Any) -> Any:
        sizes.append(layout.elements)
        return original(buffer, layout)

    collectives.reduce_scatter = counting
    try:
        yield sizes
    finally:
        del collectives.reduce_scatter


def reductions_of_a_step(recipe: Recipe) -> tuple[int, int]:
    """Elements that one optimizer step sends to be summed, and those that are trained."""
    engine = training_bodies.make_engine(recipe)
    with _sent(engine) as sizes:
        training_bodies.one_step(engine, 0)
    return sum(sizes), sum(parameter.numel() for parameter in engine.module.parameters())


def norm_of_a_step(recipe: Recipe) -> float:
    """The gradients' norm of a first step."""
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    norm: float = engine.gradient_norm
    return norm


def all_reduced_in_a_step(recipe: Recipe) -> tuple[int, int]:
    """Elements that one step all-reduces between copies of this rank's shards, and those that are trained."""
    engine = training_bodies.make_engine(recipe)
    sent, real, between = list[int](), dist.all_reduce, engine._reducer._replicas

    def count(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if named.get("group") is between:
            sent.append(tensor.numel())
        return real(tensor, *arguments, **named)

    with mock.patch.object(dist, "all_reduce", count):
        training_bodies.one_step(engine, 0)
    return sum(sent), sum(parameter.numel() for parameter in engine.module.parameters())


def _engine_by_config(zero: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        sample_data=[training_bodies.batch_of(0, 1)],
        config={"train_batch_size": 12, "bf16": {"enabled": False}, "zero_optimization": zero},
    )
    return engine


ByConfig = tuple[str, tuple[int, int, int], list[float]]


def train_by_config(zero: dict[str, Any], steps: int) -> ByConfig:
    """Return who trains by a config's ZeRO section, over dp_replicate x dp_shard ranks with hpz, and the losses."""
    return _train(_engine_by_config(zero), steps)


def _train(engine: Any, steps: int) -> ByConfig:
    plan = engine.configuration
    losses = [training_bodies.one_step(engine, step) for step in range(steps)]
    return plan.backend, (plan.dp_replicate, plan.dp_shard, plan.hpz_partition_size), losses


def train_with_hpz(zero: dict[str, Any], steps: int) -> tuple[ByConfig, int, int]:
    """Train, and the elements of DeepSpeed's second partitions between backward and step, and those of the model."""
    groups: Any = import_module("deepspeed.utils.groups")
    try:
        engine = _engine_by_config(zero)
        trained = _train(engine, steps)
        rank, world = engine.environment.rank, engine.environment.world_size
        engine.backward(engine(*(tensor[rank::world] for tensor in training_bodies.batch_of(1))))
        parameters: list[Any] = list(engine.module.parameters())
        second = [parameter.ds_secondary_tensor for parameter in parameters]
        return trained, sum(copy.numel() for copy in second if copy is not None), sum(p.ds_numel for p in parameters)
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # a process has one, for all its engines


def train_without_syncing(recipe: Recipe) -> tuple[int, dict[str, torch.Tensor]]:
    """Train one step with all but the last backward pass inside `no_sync`: elements sent inside it, and the weights."""
    engine = training_bodies.make_engine(recipe)
    rank, world = engine.environment.rank, engine.environment.world_size
    ids, targets = (tensor[rank::world].chunk(recipe.accumulation) for tensor in training_bodies.batch_of(0))
    with _sent(engine) as sizes, engine.no_sync():
        for part in range(recipe.accumulation - 1):
            engine.backward(engine(ids[part], targets[part]))
            engine.step()
        inside = sum(sizes)
    engine.backward(engine(ids[-1], targets[-1]))
    engine.step()
    return inside, training_bodies.whole_parameters(engine)


def events_of_a_step(recipe: Recipe, config: dict[str, Any] | None = None) -> list[tuple[str, float, float]]:
    """Name, begin and end (microseconds) of what a step did after two others, by torch's profiler."""
    torch.manual_seed(3)
    engine, *_ = initialize(model=training_bodies.TinyModel(), plan=recipe.plan(), config=config)
    for step in range(2):
        training_bodies.one_step(engine, step)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        training_bodies.one_step(engine, 2)
    return [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events() or ()]


def overflow_and_recover(recipe: Recipe, scale_power: int) -> tuple[list[float], int, list[float], bool]:
    """Loss scales and losses of steps that begin with too large a scale, steps skipped, and whether weights stayed."""
    torch.manual_seed(3)
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=recipe.plan(),
        config={"fp16": {"enabled": True, "initial_scale_power": scale_power, "hysteresis": 1, "loss_scale_window": 4}},
    )
    before = training_bodies.whole_parameters(engine)
    scales, losses = [], []
    for step in range(recipe.steps):
        losses.append(training_bodies.one_step(engine, step))
        scales.append(engine.loss_scale)
        if step == 0:
            after = training_bodies.whole_parameters(engine)
    return scales, engine.skipped_steps, losses, all(torch.equal(before[name], after[name]) for name in before)


def poison_on_rank_1(recipe: Recipe) -> tuple[bool, int, float | None, list[float]]:
    """A loss that is not a number on rank 1 alone: whether weights stayed, steps skipped, the norm, later losses."""
    engine = training_bodies.make_engine(recipe)
    before = training_bodies.whole_parameters(engine)
    loss = engine(*(tensor[:2] for tensor in training_bodies.batch_of(0)))
    engine.backward(loss * (torch.nan if engine.environment.rank == 1 else 1.0))
    engine.step()
    after = training_bodies.whole_parameters(engine)
    stayed = all(torch.equal(before[name], after[name]) for name in before)
    norm = engine.gradient_norm
    return stayed, engine.skipped_steps, norm, [training_bodies.one_step(engine, step) for step in range(4)]


def evaluate_and_change(recipe: Recipe) -> dict[str, Any]:
    """Return what reading, evaluating and changing the weights of stage 3 gives between steps."""
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    weight = engine.module.blocks[1].up.weight
    batch = training_bodies.batch_of(1)
    figures: dict[str, Any] = {"released": bool(weight.isnan().all()), "shape": tuple(weight.shape)}
    engine.eval()
    with torch.no_grad():
        figures["evaluated"] = engine(*batch).item()
    figures["released after evaluation"] = bool(weight.isnan().all())
    with engine.whole_parameters(), torch.no_grad():
        figures["inside"] = engine.module(*batch).item()  # the module itself, as `generate` calls it
        figures["whole"] = bool(weight.isfinite().all())
    with engine.whole_parameters(keeps_changes=True), torch.no_grad():
        engine.module.blocks[1].up.weight.fill_(0.25 + engine.environment.rank)
    figures["changed"] = training_bodies.whole_parameters(engine)["blocks.1.up.weight"].unique().tolist()
    engine.train()
    figures["continued"] = training_bodies.one_step(engine, 1)
    return figures


def two_gradients(recipe: Recipe) -> None:
    """Two losses of one forward pass, handed to the engine one after the other inside one backward pass's hooks."""
    engine = training_bodies.make_engine(recipe)
    reducer: Reducer = engine._reducer
    loss = engine(*training_bodies.batch_of(0))
    reducer.begin(reduces=True)
    loss.backward(retain_graph=True)
    loss.backward()


class WideModel(nn.Module):
    """Two million parameters and hardly an activation, so that what is alive is states."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 256)
        self.blocks = nn.ModuleList([training_bodies.Block(256) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float().square().mean()


def live_states(recipe: Recipe, config: dict[str, Any]) -> dict[str, int]:
    """Live bytes of a rank in the third step, and the elements of the model and of its small parameters."""
    engine, *_ = initialize(
        model=WideModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
        plan=recipe.plan(),
        config=config,
    )
    x, live = torch.ones(1, 8), dict[str, int]()

    def micro_batch(label: str) -> None:
        engine.backward(engine(x))
        live[label] = tracker.live_bytes
        engine.step()

    gc.collect()
    sharded_model = [tensor for tensor in reachable_tensors() if _belongs_to(tensor, engine)]
    with StorageTracker(sharded_model) as tracker:
        for _ in range(3):
            live["between"] = tracker.live_bytes
            for part in range(recipe.accumulation):
                micro_batch("last" if part == recipe.accumulation - 1 else "first")
    sizes = [parameter.numel() for parameter in engine.module.parameters()]
    return {**live, "all": sum(sizes), "small": sum(size for size in sizes if size <= 10 * training_bodies.WIDTH)}


def _belongs_to(tensor: torch.Tensor, engine: Any) -> bool:
    """Return whether a tensor is this engine's: a rank of a pool holds those of earlier tests as well, fake ones among
    them, whose storages have no address."""
    buckets = (*engine._sharded_model.trained, *engine._sharded_model.fixed)
    own = [*engine.module.parameters(), *(t for b in buckets for t in (b.whole, b.part, b.master))]
    return tensor.untyped_storage()._cdata in {shard.untyped_storage()._cdata for shard in own}


def save_after(recipe: Recipe, directory: str, steps: int) -> list[float]:
    """Train, save, and the losses of the next two steps."""
    engine = training_bodies.make_engine(recipe)
    for step in range(steps):
        training_bodies.one_step(engine, step)
    engine.save_checkpoint(Path(directory), client_state={"at": steps})
    return [training_bodies.one_step(engine, step) for step in range(steps, steps + 2)]


def resume_from(recipe: Recipe, directory: str, steps: int) -> list[float]:
    """The losses of two steps trained from a checkpoint."""
    engine = training_bodies.make_engine(replace(recipe))
    _, state = engine.load_checkpoint(Path(directory))
    assert state == {"at": steps}
    return [training_bodies.one_step(engine, step) for step in range(steps, steps + 2)]
