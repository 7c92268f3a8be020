"""A model that ranks split by hand: each element has a gradient of its own, so that no part needs another's forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.types.plan import Configuration
from strategies.checkpoint.states import unwrapped
from strategies.config.read import read_config
from strategies.distributed.environment import Environment, join
from strategies.engine.base import Engine, Strategy
from strategies.engine.registry import NATIVE, STRATEGIES
from strategies.errors import DsplanError
from strategies.parallel.split import ModelParts, even_split, hold_part, note_parts
from strategies.protocols import TrainingParts
from tests.strategies.training_bodies import Recipe

BLOCKS, WIDTH, HEADS, EXPERTS = 4, 6, 4, 4


class Part(nn.Module):
    """Weights and nothing else: [rows, columns], and a bias [rows]."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / 4)
        self.bias = nn.Parameter(torch.randn(shape[0]) / 4) if bias else None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Part(WIDTH)
        self.qkv = Part(3 * 2 * HEADS, WIDTH, bias=True)
        self.keys = Part(4, WIDTH)
        self.up = Part(4 * WIDTH, WIDTH, bias=True)
        self.down = Part(WIDTH, 4 * WIDTH)
        self.experts = Part(EXPERTS, 5, WIDTH)
        self.register_buffer("scales", torch.rand(2 * HEADS))

    def forward(self, x: tuple[torch.Tensor, ...], prefix: str, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        # Experts see the samples of all ranks, which their owners have in the real exchange of tokens.
        own = [(name, parameter) for name, parameter in self.named_parameters(prefix) if "experts" not in name]
        experts = [(f"{prefix}.experts.weight", self.experts.weight)]
        return total_of(own, x[0], factors) + x[1].mean() * total_of(experts, x[2], factors)


class ElementModel(nn.Module):
    """The loss is the sum over all elements w of w²/2 + x·w·(1 + place of w), for a batch x [samples]."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = Part(10, WIDTH)
        self.blocks = nn.ModuleList([Layers() for _ in range(BLOCKS)])
        self.norm = Part(WIDTH)
        self.head = Part(10, WIDTH)
        if tied:
            self.head.weight = self.embedding.weight
        self.extra = 0
        self.factors: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """Remember where each element is in the whole, as long as it is whole."""
        shapes = dict(self.named_parameters(remove_duplicate=False))
        self.factors = {
            name: 1 + torch.arange(parameter.numel()).view(parameter.shape) % 7 / 7 + len(name) / 40
            for name, parameter in shapes.items()
        }

    def forward(self, x: torch.Tensor, ep: torch.Tensor, everyones: torch.Tensor) -> torch.Tensor:
        outside = [(name, parameter) for name, parameter in self.named_parameters() if not name.startswith("blocks")]
        total = total_of(outside, x, self.factors)
        for index, block in self.blocks.named_children():
            total = total + block((x, ep, everyones), f"blocks.{index}", self.factors)
        return total

    def get_extra_state(self) -> Any:
        return {"calls": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["calls"]


def total_of(
    named: Iterable[tuple[str, nn.Parameter]], x: torch.Tensor, factors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The sum of the model's loss over some parameters."""
    parts = []
    for wrapped_name, parameter in named:
        name, value = unwrapped(wrapped_name), parameter.float()
        share = factors.get(f"{name}/share", torch.ones(()))
        value = value * share + value.detach() * (1 - share)
        parts.append((value.square() / 2 + x.mean() * factors[name] * value).sum())
    return torch.stack(parts).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A strategy and degrees; `dp` is dp_replicate under ddp and dp_shard elsewhere."""

    strategy: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def configuration(self) -> Configuration:
        recipe = Recipe(strategy=self.strategy, backend="native" if self.strategy.startswith("zero") else "")
        replicates = {"single": 1, "ddp": self.dp, "hsdp": 2}.get(self.strategy, 1)
        return replace(
            recipe.plan().configuration,
            dp_replicate=replicates,
            dp_shard=self.dp // replicates,
            **{name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "precision", "optimizer")},
            micro_batch_size=12 // self.dp,
        )


def split_by_hand(model: ElementModel, strategy: Strategy, *, partial: bool = False) -> None:
    """Leave this rank's part of a model: heads of fused products, columns and rows, keys that two ranks have, experts
    and blocks; with `partial`, norms have a part of their gradient on each tp rank."""
    mesh = strategy.mesh
    tp, rank = mesh.size("tp"), mesh.rank("tp")
    parts = ModelParts(tp=(rank, tp))
    shapes = dict(model.state_dict())
    for name in shapes:
        if tp > 1 and ("qkv" in name or "up" in name or "scales" in name):
            parts.splits[name] = even_split(shapes[name].shape, 0, rank=rank, ranks=tp, fused=3 if "qkv" in name else 1)
        if tp > 1 and "down" in name:
            parts.splits[name] = even_split(shapes[name].shape, -1, rank=rank, ranks=tp)
        if tp > 1 and "keys" in name:
            split = even_split(shapes[name].shape, 0, rank=rank // 2, ranks=max(1, tp // 2))
            parts.splits[name] = replace(split, copies=2)
            model.factors[f"{name}/share"] = torch.tensor(0.5)
        if mesh.size("ep") > 1 and "experts" in name:
            parts.splits[name] = even_split(
                shapes[name].shape, 0, rank=mesh.rank("ep"), ranks=mesh.size("ep"), over="ep"
            )
            parts.experts.add(name)
        if partial and tp > 1 and ".norm." in name:
            parts.summed.add(name)
            model.factors[f"{name}/share"] = torch.tensor(1 / tp)
    for name, split in parts.splits.items():
        owner, _, last = name.rpartition(".")
        hold_part(getattr(model.get_submodule(owner), last), split)
        if name in model.factors:
            model.factors[name] = split.take(model.factors[name])
    if mesh.size("pp") > 1:
        stage, stages = mesh.rank("pp"), mesh.size("pp")
        own = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        for index in range(BLOCKS):
            if index not in own:
                del model.blocks._modules[str(index)]
        is_first, is_last = stage == 0, stage == stages - 1
        if not is_last:
            del model.head, model.norm
        if not is_first:
            del model.embedding
        for name, present in (("embedding.weight", is_first), ("head.weight", is_last)):
            if present:
                parts.shared[name] = "embedding.weight"
                model.factors[f"{name}/share"] = torch.tensor(0.5)
        parts.blocks = (own,)
        # A tied weight has the factor of its first name wherever it is.
        model.factors["head.weight"] = model.factors["embedding.weight"]
    if not parts.is_whole:
        note_parts(model, parts)


def make(composition: Composition, *, compression: str = "none", partial: bool = False) -> Engine:
    """An engine for this rank's part of the model, as `initialize` makes it."""
    torch.manual_seed(3)
    model = ElementModel()
    model.note()
    configuration = composition.configuration()
    environment: Environment = join()
    places = NATIVE if configuration.backend == "native" else STRATEGIES
    module, _, name = places[configuration.strategy].partition(":")
    strategy: Strategy = getattr(__import__(module, fromlist=[name]), name)(configuration, environment)
    split_by_hand(model, strategy, partial=partial)
    plan = replace(Recipe().plan(), configuration=configuration)
    parts = TrainingParts(
        model=model,
        plan=plan,
        optimizer=lambda parameters: torch.optim.AdamW(grouped(model), lr=0.01),
        gradient_clipping=0.5,
        script=read_config({"communication": {"compression": compression, "block_size": 16}}),
    )
    return strategy.engine(parts)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors without weight decay: a group that a stage may have few of."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]


def steps(engine: Engine, first: int, count: int = 2) -> list[float]:
    """The gradient norms of steps on this rank's samples."""
    norms = []
    for step in range(first, first + count):
        batch = torch.linspace(-1, 2, 12).roll(step)
        x = batch[engine.data_parallel_rank :: engine.data_parallel_size]
        # Not by `engine(...)` and `backward`: what a stage of this model computes depends on no other stage.
        engine._backward(engine._forward(x, torch.tensor([float(engine.mesh.size("ep"))]), batch))
        engine.step()
        norms.append(engine.gradient_norm or float("nan"))
    return norms


def save_after(composition: Composition, directory: str, partial: bool = False) -> list[float]:
    """Train two steps, save, and the norms of these and of the next two."""
    engine = make(composition, partial=partial)
    before = steps(engine, 0)
    engine.module.extra = 5  # type: ignore[assignment]
    engine.save_checkpoint(directory, client_state={"at": 2})
    return [*before, *steps(engine, 2)]


def resume_each(
    composition: Composition, directories: list[str], goal: str
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Of each checkpoint: load it, save it again below `goal`, and the norms of the next two steps, with the whole
    weights after them."""
    engine, resumed = make(composition), []
    for directory in directories:
        path, state = engine.load_checkpoint(directory)
        assert path is not None
        assert state == {"at": 2}
        assert engine.module.extra == 5
        if goal:
            engine.save_checkpoint(Path(goal, Path(directory).name), state)
        resumed.append((steps(engine, 2), engine.state_dict()))
    return resumed


def overflow(composition: Composition) -> tuple[int, bool]:
    """Steps that are skipped, and whether the weights stay, when the last rank's first gradient is not finite."""
    engine = make(composition)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    if engine.environment.rank == engine.environment.world_size - 1:
        name = next(iter(dict(engine.module.blocks.named_parameters("blocks"))))
        engine.module.factors[unwrapped(name)] *= torch.inf  # type: ignore[index, operator, union-attr]
    steps(engine, 0, 1)
    after = engine.state_dict()
    return engine.skipped_steps, all(torch.equal(before[name], after[name]) for name in before)


def norms_with(composition: Composition, compression: str) -> list[float]:
    """The norms of two steps whose gradients travel so."""
    return steps(make(composition, compression=compression), 0)


def export_from(composition: Composition, directory: str, goal: str) -> list[str]:
    """Load a checkpoint and export the weights."""
    engine = make(composition)
    engine.load_checkpoint(directory)
    return [str(path) for path in engine.export(goal)]


def refusal_of(composition: Composition, directory: str, name: str) -> str:
    """Return what is said of a checkpoint that lacks a weight which one block has."""
    block, _, attribute = name.rpartition(".")
    engine = make(composition)
    names = dict(engine.module.named_modules())
    if block in names:
        setattr(names[block], attribute, nn.Parameter(torch.zeros(3)))
    try:
        engine.load_checkpoint(directory)
    except DsplanError as problem:
        return str(problem)
    return ""
