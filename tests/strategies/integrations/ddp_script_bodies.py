"""Hand-written training loops around DDP, as the scripts that people have write them, for the rank pool."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardware_db.errors import DsplanError
from strategies.integrations.ddp_script import ScriptParallel, configuration_for
from strategies.run_directory.heartbeat import PULSE
from tests.strategies.training_bodies import Recipe, TinyModel, batch_of, make_engine, one_step

STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """The way in which a script trains."""

    strategy: str = "ddp"
    optimizer_first: bool = False
    accumulation: int = 1
    accumulates_by: str = "no_sync"  # or `flag` (nanoGPT's), or `sum`: every micro-batch is reduced
    clipping: float = 0.0
    scheduler: bool = False
    scaler: bool | None = None
    kind: str = "adamw"
    clears: str = "optimizer"
    keeps_no_sync: bool = False


class Noisy(TinyModel):
    """A model with a buffer that every rank changes, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.training:
            self.seen += ids.float().mean()
        return super().forward(ids, targets)


def wrapped(model: nn.Module, loop: Loop) -> nn.Module:
    if loop.strategy == "ddp":
        return DistributedDataParallel(model)
    configuration = configuration_for(loop.strategy, dist.get_world_size())  # type: ignore[arg-type]
    if loop.keeps_no_sync:
        configuration = replace(configuration, sync_each_micro_batch=False)
    return ScriptParallel(model, device_ids=None, configuration=configuration)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def train(loop: Loop) -> dict[str, Any]:
    """Return what a script trains: losses over all ranks, norms it clipped by, its evaluation, and its checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # rank 0's weights must be everyone's
    model: nn.Module = Noisy()
    early = optimizer_of(model, loop.kind) if loop.optimizer_first else None
    model = wrapped(model, loop)
    raw_model = model.module
    optimizer = early or optimizer_of(model, loop.kind)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if loop.scheduler else None
    scaler = torch.amp.GradScaler("cpu", enabled=loop.scaler, init_scale=2.0**10) if loop.scaler is not None else None
    losses, norms = [], []
    for step in range(STEPS):
        if scheduler is None:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 + step % 3)
        ids, targets = (tensor[rank::world].chunk(loop.accumulation) for tensor in batch_of(step))
        total = torch.zeros(())
        for micro in range(loop.accumulation):
            is_last = micro == loop.accumulation - 1
            if loop.accumulates_by == "flag":
                model.require_backward_grad_sync = is_last
            waits = loop.accumulates_by == "no_sync" and not is_last
            with model.no_sync() if waits else nullcontext():
                loss = model(ids[micro], targets[micro]) / loop.accumulation
                (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if loop.clipping:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), loop.clipping)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        clear(loop.clears, model, optimizer)
        dist.all_reduce(total)
        losses.append(total.item() / world)
    model.eval()
    with torch.no_grad():
        evaluated = model(*batch_of(7)).item()
    saved = raw_model.state_dict()
    parts = [name for name, value in saved.items() if value.untyped_storage().nbytes() != value.nbytes]
    state = {name: value.detach().clone() for name, value in saved.items()}
    outer = list(model.state_dict())
    optimizer_state = optimizer.state_dict()["state"]
    states = {index: {k: v.clone() for k, v in values.items()} for index, values in optimizer_state.items()}
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "state": state,
        "parts": parts,
        "names": outer,
        "optimizer": states,
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def clear(how: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if how == "optimizer":
        optimizer.zero_grad(set_to_none=True)
    elif how == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        model.zero_grad()
    elif how == "raw_model":
        model.module.zero_grad(set_to_none=True)
    else:
        for parameter in model.parameters():
            parameter.grad = None


def is_sharded(strategy: str) -> dict[str, Any]:
    """Return what a rank holds after a step: elements of weights and optimizer states, of those of the whole model."""
    model = Noisy()
    whole = sum(parameter.numel() for parameter in model.parameters())
    model_in_ddp = wrapped(model, Loop(strategy=strategy))
    optimizer = optimizer_of(model_in_ddp, "adamw")
    model_in_ddp(*batch_of(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = {id(p.data.untyped_storage()): p for p in model.parameters()}
    held = sum(_local(p).untyped_storage().nbytes() // 4 for p in weights.values())
    states = sum(_local(values["exp_avg"]).numel() for values in optimizer.state.values())
    return {
        "weights": held / whole,
        "states": states / whole,
        "is_ddp": isinstance(model_in_ddp, DistributedDataParallel),
    }


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def resume(strategy: str, loads_after: bool) -> tuple[list[float], list[float]]:
    """Losses of steps 3 to 5 unbroken, and of a script that loads what it saved after step 2, before or after DDP."""
    unbroken, (state, optimizer_state) = _steps(strategy, range(6), None, saves_at=3, loads_after=False)
    resumed, _ = _steps(strategy, range(3, 6), (state, optimizer_state), saves_at=0, loads_after=loads_after)
    return unbroken[3:], resumed


def _steps(strategy: str, steps: range, saved: Any, *, saves_at: int, loads_after: bool) -> tuple[list[float], Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50 if saved is None else 60 + rank)
    raw: nn.Module = Noisy()
    optimizer = optimizer_of(raw, "adamw")
    if saved is not None and not loads_after:
        raw.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    model = wrapped(raw, Loop(strategy=strategy))
    if saved is not None and loads_after:
        model.load_state_dict({f"module.{name}": value for name, value in saved[0].items()})
        optimizer.load_state_dict(saved[1])
    losses, kept = [], None
    for step in steps:
        if step == saves_at and saves_at:
            kept = copy.deepcopy((raw.state_dict(), optimizer.state_dict()))
        ids, targets = (tensor[rank::world] for tensor in batch_of(step))
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses, kept


def overflow(strategy: str) -> tuple[float, float, bool]:
    """A step with a gradient that is infinite on rank 1 alone: the loss scale before and after, and whether weights
    stayed."""
    model = wrapped(Noisy(), Loop(strategy=strategy))
    optimizer = optimizer_of(model, "adamw")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    loss = model(*batch_of(0)) * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    after = model.module.state_dict()
    stayed = all(torch.equal(after[name], value) for name, value in before.items() if name != "seen")
    return scale, scaler.get_scale(), stayed


class Answer(nn.Module):
    """A model that returns a dataclass, and keeps a part of the loss to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return Returned(loss=self.inner(ids, targets))


@dataclass
class Returned:
    loss: torch.Tensor


def answered(strategy: str) -> list[float]:
    torch.manual_seed(4)
    model = wrapped(Answer(), Loop(strategy=strategy))
    optimizer = optimizer_of(model, "adamw")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch_of(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(strategy: str) -> list[float]:
    torch.manual_seed(4)
    model = wrapped(torch.compile(TinyModel(), backend="eager"), Loop(strategy=strategy))
    optimizer = optimizer_of(model, "adamw")
    losses = []
    for step in range(3):
        loss = model(*batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def refusal(strategy: str, what: str) -> str:
    """The line with which something is refused; empty where it is not."""
    try:
        if what == "process_group":
            group = dist.new_group([0, 1])
            ScriptParallel(TinyModel(), process_group=group, configuration=configuration_for(strategy, 2))  # type: ignore[arg-type]
        elif what == "comm_hook":
            wrapped(TinyModel(), Loop(strategy=strategy)).register_comm_hook(None, print)
        elif what == "compile":
            wrapped(torch.compile(TinyModel(), backend="eager"), Loop(strategy=strategy))
        elif what == "closure":
            model = (
                wrapped(raw := TinyModel(), Loop(strategy=strategy, optimizer_first=True))
                if strategy != "fsdp"
                else None
            )
            raw = raw if model is not None else TinyModel()
            optimizer = torch.optim.LBFGS(raw.parameters())
            model = model or wrapped(raw, Loop(strategy=strategy))
            model(*batch_of(0))
            del optimizer
    except DsplanError as problem:
        return str(problem)
    finally:
        gc.collect()
    return ""


def met_more_often(strategy: str) -> None:
    """A step of an engine before which rank 0 has met more often than rank 1."""
    engine = make_engine(Recipe(strategy=strategy, backend="native" if strategy == "zero3" else "", world_size=2))
    one_step(engine, 0)
    engine.backward(engine(*batch_of(1)))
    if dist.get_rank() == 0:
        with PULSE.meeting("evaluation"):
            pass
    engine.step()
