"""A small model trained for a few steps: the body that every strategy runs and the reference it is compared with."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from planner.types.plan import Configuration, MemoryEstimate, Plan, StepTime, Throughput
from planner.vocabulary import default_backend
from strategies.engine.initialize import initialize

GLOBAL_BATCH = 12
LENGTH = 6
VOCABULARY = 31
WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, three blocks, and a head tied to the embedding; the position table may be frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10, requires_grad=not frozen)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to train TinyModel for `steps` optimizer steps."""

    strategy: str = "single"
    backend: str = ""
    world_size: int = 1
    dp_replicate: int = 0
    accumulation: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: str = "none"
    offload: str = "none"
    sync_each: bool = True
    clipping: float = 0.0
    steps: int = 5
    frozen: bool = False
    own_optimizer: bool = False
    global_batch: int = GLOBAL_BATCH

    def plan(self) -> Plan:
        """A plan with this recipe's configuration; its costs are of no interest to the engine."""
        parameters = sum(parameter.numel() for parameter in TinyModel().parameters())
        return Plan(
            model={"name": "tiny", "parameters": parameters, "hidden_size": WIDTH, "vocab_size": VOCABULARY},
            cluster={"device": "cpu", "vendor": "cpu", "capacity_bytes": 2**34, "gpus": self.world_size, "nodes": 1},
            configuration=self._configuration(),
            memory=MemoryEstimate(**dict.fromkeys(_memory_numbers(), 0), peak_phase="backward"),
            time=StepTime(**{**dict.fromkeys(StepTime.__dataclass_fields__, 1.0), "phases": {}}),
            throughput=Throughput(tokens_per_second_per_gpu=1.0, samples_per_second=1.0, tflops_per_gpu=1.0, mfu=None),
            verdict="fits",
            limited_by="compute",
            runnable=True,
        )

    def _configuration(self) -> Configuration:
        replicas = self.dp_replicate or (self.world_size if self.strategy in ("single", "ddp") else 1)
        values: dict[str, Any] = {
            "strategy": self.strategy,
            "backend": self.backend or default_backend(self.strategy),
            "dp_replicate": replicas,
            "dp_shard": self.world_size // replicas,
            "micro_batch_size": self.global_batch // self.world_size // self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "global_batch_size": self.global_batch,
            "sequence_length": LENGTH,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "activation_checkpointing": self.checkpointing,
            "offload": self.offload,
            "sync_each_micro_batch": self.sync_each,
        }
        return Configuration(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The results of a run: the loss of every step over the global batch, and every parameter, whole."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def _memory_numbers() -> list[str]:
    return [name for name in MemoryEstimate.__dataclass_fields__ if name not in ("peak_phase", "phases", "states")]


def batch_of(step: int, samples: int = GLOBAL_BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: ids and targets, both [samples, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 + step % 3)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def make_engine(recipe: Recipe) -> Any:
    torch.manual_seed(3)
    model = TinyModel(frozen=recipe.frozen)
    own = torch.optim.AdamW(_groups(model), lr=2e-3) if recipe.own_optimizer else None
    engine, *_ = initialize(
        model=model,
        optimizer=own or (lambda parameters: torch.optim.AdamW(parameters, lr=2e-3)),
        plan=recipe.plan(),
        config={"gradient_clipping": recipe.clipping},
    )
    return engine


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without: the groups most scripts make."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trainable if parameter.dim() == 1], "weight_decay": 0.0},
    ]


def train(recipe: Recipe) -> Trained:
    """Train with the engine; the losses are averaged over ranks and micro-batches."""
    engine = make_engine(recipe)
    losses = [one_step(engine, step) for step in range(recipe.steps)]
    return Trained(losses=losses, parameters=whole_parameters(engine))


def one_step(engine: Any, step: int, *, poisons: bool = False) -> float:
    """One optimizer step on this rank's part of the step's global batch; the mean loss over the global batch.

    `poisons` asks the model for a first micro-batch with a gradient that overflows.
    """
    rank, world = engine.environment.rank, engine.environment.world_size
    accumulation = engine.configuration.gradient_accumulation_steps
    batch = batch_of(step, engine.configuration.global_batch_size)
    ids, targets = (tensor[rank::world].chunk(accumulation) for tensor in batch)
    total = torch.zeros((), device=engine.environment.device)
    for part in range(accumulation):
        loss = engine(ids[part], targets[part], **({"poison": True} if poisons and part == 0 else {}))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / accumulation
    if world > 1:
        torch.distributed.all_reduce(total)
    return total.item() / world


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter by its name in the model, whole, on this rank."""
    with engine.whole_parameters():
        return {name: value.detach().float().to("cpu", copy=True) for name, value in engine.module.named_parameters()}


def reference(recipe: Recipe) -> Trained:
    """The same training in plain torch: one process, whole global batch, no engine."""
    what = ("steps", "global_batch", "clipping", "frozen", "own_optimizer")
    return _reference(Recipe(**{name: getattr(recipe, name) for name in what}))


@cache
def _reference(recipe: Recipe) -> Trained:
    torch.manual_seed(3)
    model = TinyModel(frozen=recipe.frozen)
    groups = _groups(model) if recipe.own_optimizer else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    losses = []
    for step in range(recipe.steps):
        loss = model(*batch_of(step, recipe.global_batch))
        loss.backward()
        if recipe.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses=losses, parameters={name: p.detach().clone() for name, p in model.named_parameters()})


def save_and_resume(recipe: Recipe, directory: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses of steps 3.. of an unbroken run and of one resumed after step 2, and the client state that came back."""
    folder = Path(directory)
    engine = make_engine(recipe)
    for step in range(3):
        one_step(engine, step)
    engine.save_checkpoint(folder, client_state={"step": 3, "note": "after three"})
    unbroken = [one_step(engine, step) for step in range(3, 6)]
    fresh = make_engine(replace(recipe))
    path, client_state = fresh.load_checkpoint(folder)
    assert path is not None
    assert path.name == "step-00000003"
    assert fresh.global_steps == 3
    return unbroken, [one_step(fresh, step) for step in range(3, 6)], client_state


def environment_of(name: str) -> str | None:
    return os.environ.get(name)


def train_with_planned_optimizer(recipe: Recipe) -> tuple[str, list[float]]:
    """The class of the optimizer the engine made, and the losses it reached."""
    torch.manual_seed(3)
    engine, optimizer, *_ = initialize(model=TinyModel(), plan=recipe.plan())
    return type(optimizer).__name__, [one_step(engine, step) for step in range(recipe.steps)]


def state_bytes(recipe: Recipe) -> int:
    """Bytes of this rank's optimizer state after a step."""
    engine = make_engine(recipe)
    one_step(engine, 0)
    optimizer = engine.optimizer
    state = getattr(optimizer, "optimizer", optimizer).state
    leaves = [leaf for values in state.values() for leaf in values.values() if isinstance(leaf, torch.Tensor)]
    local = [getattr(leaf, "_local_tensor", leaf) for leaf in leaves]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.dim() > 0)


def what_is_left_of_engines(recipe: Recipe) -> tuple[bool, bool]:
    """Return whether a model that a script still holds is trained after it dropped the engine, and whether the engine
    is there when the model is dropped too."""
    engine = make_engine(recipe)
    one_step(engine, 0)
    model, watched = engine.module, weakref.ref(engine)
    del engine
    gc.collect()
    is_kept = watched() is not None
    del model
    gc.collect()
    return is_kept, watched() is not None


def first_weights_of_unlike_models(recipe: Recipe) -> torch.Tensor:
    """A weight after `initialize`, where every rank came with weights of its own."""
    torch.manual_seed(100 + torch.distributed.get_rank())
    engine, *_ = initialize(model=TinyModel(), plan=recipe.plan())
    return whole_parameters(engine)["blocks.1.up.weight"]


def tracked_step(recipe: Recipe) -> tuple[int, int, list[tuple[int, ...]]]:
    """Live bytes after the third step, its peak, and the shapes of the whole model's parameters."""
    from strategies.tracing.storage_tracker import StorageTracker

    engine = make_engine(recipe)
    for step in range(2):
        one_step(engine, step)
    with StorageTracker(engine.module.parameters()) as tracker:
        one_step(engine, 2)
    return tracker.live_bytes, tracker.peak_bytes, [tuple(p.shape) for p in TinyModel().parameters()]


def step_and_save(recipe: Recipe, directory: str, steps: int) -> list[float]:
    """Train `steps` steps, save, and train one more: its loss."""
    engine = make_engine(recipe)
    for step in range(steps):
        one_step(engine, step)
    engine.save_checkpoint(directory)
    return [one_step(engine, steps)]


def load_and_step(recipe: Recipe, directory: str, step: int) -> float:
    """The loss of a step trained from a checkpoint."""
    engine = make_engine(recipe)
    engine.load_checkpoint(directory)
    return one_step(engine, step)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Forty samples of ids and targets."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = batch_of(index)
        return ids[0], targets[0]
