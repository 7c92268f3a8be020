"""Functions that ranks run in the tests of ZeRO's optimizers: those that look at whole tensors, and few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

from hardware_db.errors import DsplanError
from strategies.engine.initialize import initialize
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe

BATCH, WORDS = 12, 29


class Lamb(optim.Optimizer):
    """Updates as long as the tensor they belong to (You et al. 2020, without its moments): no part has that length."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["trust"] = torch.zeros(1)
                    state["steps"] = 0
                update = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                state["trust"] = (parameter.norm() / update.norm().clamp(min=1e-6)).reshape(1).float()
                state["steps"] += 1
                parameter.add_(update * state["trust"].to(update.dtype), alpha=-group["lr"])


class EightBit(optim.Optimizer):
    """Momentum in 8 bits with a scale for every 256 values, in the states that bitsandbytes has for small blocks."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, self.state[parameter], group["lr"])

    def _step_one(self, parameter: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        blocks = -(-parameter.numel() // 256)
        if not state:
            state["step"] = 0
            state["state1"] = torch.full_like(parameter, 128, dtype=torch.uint8)
            state["qmap1"] = torch.linspace(-1, 1, 256)
            state["absmax1"] = torch.zeros(blocks)
        state["step"] += 1
        old = state["qmap1"][state["state1"].reshape(-1).long()]
        old = old * state["absmax1"].repeat_interleave(256)[: old.numel()]
        momentum = functional.pad(0.9 * old + parameter.grad.reshape(-1).float(), (0, blocks * 256 - old.numel()))
        rows = momentum.view(blocks, 256)
        state["absmax1"] = rows.abs().amax(1).clamp(min=1e-12)
        codes = ((rows / state["absmax1"][:, None] + 1) * 127.5).round().to(torch.uint8)
        state["state1"] = codes.reshape(-1)[: old.numel()].view(parameter.shape)
        parameter.sub_(momentum[: old.numel()].view(parameter.shape), alpha=lr)


class MuonAndAdam(optim.Muon):
    """Muon for matrices, and sign descent for the rest, which need not be whole."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        members = list(params)
        super().__init__([p for p in members if p.dim() == 2], lr=0.02)
        rest = {"params": [p for p in members if p.dim() != 2], "whole_tensors": False, "signs": True}
        optim.Optimizer.add_param_group(self, rest)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        self.param_groups = [group for group in groups if "signs" not in group]
        super().step()
        self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if "signs" in group else ():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-0.001)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "muon": lambda p: optim.Muon([parameter for parameter in p if parameter.dim() == 2], lr=0.02),
    "muon and signs": MuonAndAdam,
    "lamb": Lamb,
    "8-bit": EightBit,
    "grouped by shape": lambda p: optim.AdamW(
        [
            {"params": [parameter for parameter in p if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in p if parameter.dim() <= 1], "lr": 0.1},
        ],
        lr=0.01,
    ),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "sparse adam": lambda p: optim.SparseAdam([parameter for parameter in p if len(parameter) == WORDS + 1], lr=0.05),
    "sgd of few rows": lambda p: optim.SGD(p, lr=0.05),
    "adagrad of few rows": lambda p: optim.Adagrad(p, lr=0.05),
    "lbfgs": optim.LBFGS,
    "sparse adam and a dense layer": lambda p: optim.SparseAdam([tensor for tensor in p if tensor.shape[-1] == 19]),
}


class Words(nn.Module):
    """Embeddings, a shared layer, a convolution and a frozen vector, in widths that divide by nothing."""

    def __init__(self, *, sparse: bool, shared: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, 19, sparse=sparse)  # one word never occurs
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(19, 23), nn.Tanh(), nn.Linear(23, 19)) for _ in range(3)])
        if shared:
            self.blocks[2][2].weight = self.blocks[0][2].weight
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.full((19,), 0.5), requires_grad=False)
        self.head = nn.Linear(19, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = hidden + self.convolution(hidden.unsqueeze(1)).sum(1)
        return functional.cross_entropy(self.head(hidden).float(), (ids + 1) % WORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One way to train Words."""

    optimizer: str
    strategy: str = "zero2"
    world_size: int = 2
    steps: int = 4
    accumulation: int = 1
    clipping: float = 0.0
    precision: str = "fp32"
    is_built: bool = False
    backend: str = "native"

    @property
    def is_sparse(self) -> bool:
        return self.optimizer in ("sparse adam", "sgd of few rows", "adagrad of few rows")

    @property
    def model(self) -> Words:
        return Words(sparse=self.is_sparse, shared=not self.strategy.startswith("fsdp"))  # FSDP2 refuses to share

    def plan(self) -> Any:
        backend = self.backend if self.strategy.startswith("zero") else ""
        return Recipe(
            strategy=self.strategy,
            backend=backend,
            world_size=self.world_size,
            accumulation=self.accumulation,
            precision=self.precision,
        ).plan()


def batch_of(step: int) -> torch.Tensor:
    """Few of the words, others in every step: [BATCH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS // 2, (BATCH,), generator=generator) + step % 3 * (WORDS // 4)


def engine_of(run: Run) -> Any:
    torch.manual_seed(11)
    model, make = run.model, OPTIMIZERS[run.optimizer]
    optimizer = make(list(model.parameters())) if run.is_built else make
    config = {"gradient_clipping": run.clipping, "zero_optimization": {"stage3_param_persistence_threshold": 30}}
    engine, *_ = initialize(model=model, optimizer=optimizer, plan=run.plan(), config=config)
    return engine


def _unfreeze(model: Words, optimizer: optim.Optimizer, how: str) -> None:
    """In the third step: a block and a vector that were frozen; in the optimizer they are already, or come now."""
    late = [*model.blocks[1].parameters(), model.scale, model.head.bias]
    for parameter in late:
        parameter.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": late, "lr": 0.02})


def _late(run: Run, how: str) -> tuple[Words, optim.Optimizer]:
    """A model with frozen parts and its optimizer; the head's bias requires gradients from the start."""
    torch.manual_seed(11)
    model = run.model
    model.blocks[1].requires_grad_(False)
    late = {*model.blocks[1].parameters(), model.scale, model.head.bias}
    first = [p for p in model.parameters() if how != "added" or p not in late]
    kind = optim.Adafactor if run.optimizer == "adafactor" else optim.AdamW
    return model, kind(first, lr=0.01)


def train_late(run: Run, how: str) -> dict[str, torch.Tensor]:
    """Every parameter after training in which some join late."""
    model, optimizer = _late(run, how)
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 30}}
    engine, *_ = initialize(model=model, optimizer=optimizer, plan=run.plan(), config=config)
    train_steps(engine, run, range(2))
    _unfreeze(model, engine.optimizer, how)
    train_steps(engine, run, range(2, 5))
    stepped = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    assert run.optimizer == "adafactor" or len(engine.optimizer.state) == stepped
    return training_bodies.whole_parameters(engine)


def reference_late(run: Run, how: str) -> dict[str, torch.Tensor]:
    """The same in one process."""
    model, optimizer = _late(run, how)
    for step in range(5):
        if step == 2:
            _unfreeze(model, optimizer, how)
        for part in batch_of(step).chunk(run.world_size * run.accumulation):
            (model(part) / run.world_size / run.accumulation).backward()
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def refusal(run: Run) -> str:
    """Return what the engine says to an optimizer, when it is made or in its first step."""
    with pytest.raises(DsplanError) as caught:
        train_steps(engine_of(run), run, range(1))
    return str(caught.value)


def train_steps(engine: Any, run: Run, steps: Iterable[int]) -> list[float]:
    """Losses over the global batch."""
    rank, world = engine.environment.rank, engine.environment.world_size
    losses = []
    for step in steps:
        total = torch.zeros(())
        for part in batch_of(step).chunk(world)[rank].chunk(run.accumulation):
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / run.accumulation
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def train(run: Run) -> dict[str, torch.Tensor]:
    """Every parameter after training."""
    engine = engine_of(run)
    train_steps(engine, run, range(run.steps))
    return training_bodies.whole_parameters(engine)


def reference(run: Run) -> dict[str, torch.Tensor]:
    """The same in one process, rank by rank, so that gradients are added in the same order."""
    torch.manual_seed(11)
    model = run.model
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    for step in range(run.steps):
        for part in batch_of(step).chunk(run.world_size * run.accumulation):
            (model(part) / run.world_size / run.accumulation).backward()
        if run.clipping:
            _clip([p for p in model.parameters() if p.grad is not None], run.clipping)
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _clip(parameters: list[nn.Parameter], limit: float) -> None:
    """torch's `clip_grad_norm_` takes no sparse gradients."""
    norm = torch.stack([parameter.grad.to_dense().norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad = parameter.grad * min(1.0, limit / (norm.item() + 1e-6))


def save(run: Run, directory: str) -> list[float]:
    """Train, save, and the losses of the next two steps."""
    engine = engine_of(run)
    train_steps(engine, run, range(run.steps))
    engine.save_checkpoint(Path(directory))
    return train_steps(engine, run, range(run.steps, run.steps + 2))


def resume(run: Run, directory: str) -> list[float]:
    """The losses of two steps from a checkpoint."""
    engine = engine_of(run)
    engine.load_checkpoint(Path(directory))
    return train_steps(engine, run, range(run.steps, run.steps + 2))
