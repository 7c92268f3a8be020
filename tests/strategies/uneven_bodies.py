"""Training where ranks have unlike shares of every micro-batch, and the same with as many samples on each."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from planner.types.plan import Plan
from strategies.engine.initialize import initialize
from tests.strategies.training_bodies import TinyModel, Trained, batch_of, whole_parameters


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of ids and targets, all unlike."""

    def __init__(self, length: int) -> None:
        self._ids, self._targets = batch_of(0, length)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ids[index], self._targets[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A plan, and how its ranks are slowed."""

    plan: Plan
    steps: int = 5
    clipping: float = 0.0
    seconds_per_sample: tuple[float, ...] = ()
    """That each rank sleeps in a forward pass."""


def train(run: Run) -> Trained:
    """Train on the loader's micro-batches; the losses are those of `train_batch`."""
    engine, batches = _start(run)
    losses = [engine.train_batch(batches).item() for _ in range(run.steps)]
    return Trained(losses=losses, parameters=whole_parameters(engine))


def train_unweighted(run: Run) -> Trained:
    """The same where every rank counts alike."""
    engine, batches = _start(run)
    vars(engine)["sample_weight"] = 1.0
    losses = [engine.train_batch(batches).item() for _ in range(run.steps)]
    return Trained(losses=losses, parameters=whole_parameters(engine))


def _start(run: Run) -> tuple[Any, Any]:
    torch.manual_seed(3)
    engine, _, loader, _ = initialize(
        model=TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=run.plan,
        training_data=Sentences(run.steps * run.plan.configuration.global_batch_size),
        config={"gradient_clipping": run.clipping},
    )
    return engine, iter(loader)


def train_by_calls(run: Run) -> tuple[list[int], Trained]:
    """The same by the three calls: the samples of this rank's micro-batches, and its share of the losses."""
    engine, batches = _start(run)
    sizes, losses = [], []
    for ids, targets in batches:
        loss = engine(ids, targets)
        sizes.append(len(ids))
        losses.append(loss.item() * engine.sample_weight)
        engine.backward(loss)
        engine.step()
    return sizes, Trained(losses=losses, parameters=whole_parameters(engine))


def resume_evenly(uneven: Run, even: Run, directory: str) -> list[float]:
    """Losses of two steps of unlike shares, and then of alike ones from their checkpoint."""
    engine, batches = _start(uneven)
    losses = [engine.train_batch(batches).item() for _ in range(2)]
    engine.save_checkpoint(directory)
    fresh, _ = _start(even)
    fresh.load_checkpoint(directory)
    batches = iter(fresh.dataloader)
    return losses + [fresh.train_batch(batches).item() for _ in range(uneven.steps - 2)]


def refused(run: Run, samples: int) -> str:
    """The message for a micro-batch of another size than the rank's."""
    engine, _ = _start(replace(run))
    ids, targets = batch_of(0, samples)
    try:
        engine(ids, targets)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def seconds_of_steps(run: Run) -> list[float]:
    """Seconds of each step where every sample of a rank takes so long."""
    engine, batches = _start(run)
    rank = engine.environment.rank
    engine.module.register_forward_pre_hook(
        lambda module, inputs: time.sleep(run.seconds_per_sample[rank] * len(inputs[0]))
    )
    seconds = []
    for _ in range(run.steps):
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.train_batch(batches)
        seconds.append(time.perf_counter() - begin)
    return seconds
