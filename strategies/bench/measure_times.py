"""The time of an engine's steps on this rank: whole, and of forward, backward and optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from strategies.engine.base import Engine

WARM_UP_STEPS = 2
"""Lazy states, DDP's rebuilt buckets and DeepSpeed's traces of stage 3 are settled after two steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Seconds of one optimizer step and of its parts, which add up to it; `loss` is its micro-batches' mean."""

    step: float
    forward: float
    backward: float
    optimizer: float
    loss: float


def measure_times(
    engine: Engine, batches: Iterator[Mapping[str, torch.Tensor]], steps: int, *, warm_up: int = WARM_UP_STEPS
) -> tuple[TimedStep, ...]:
    """Train `warm_up` steps and then `steps` more whose times are returned; every rank must call this together."""
    for _ in range(warm_up):
        _timed_step(engine, batches)
    if dist.is_initialized():
        dist.barrier()
    return tuple(_timed_step(engine, batches) for _ in range(steps))


def mean_over_ranks(ranks: Sequence[Sequence[TimedStep]]) -> tuple[TimedStep, ...]:
    """Step by step the mean of the ranks, which no rank's waiting for another can move."""
    names = [item.name for item in fields(TimedStep)]
    return tuple(
        TimedStep(**{name: sum(getattr(timed, name) for timed in step) / len(step) for name in names})
        for step in zip(*ranks, strict=True)
    )


def _timed_step(engine: Engine, batches: Iterator[Mapping[str, torch.Tensor]]) -> TimedStep:
    """One optimizer step; a GPU is waited for at its end alone, so that its parts are what the host saw."""
    parts = [0.0, 0.0, 0.0]
    losses: list[torch.Tensor] = []
    started = time.perf_counter()
    for _ in range(engine.configuration.gradient_accumulation_steps):
        marks = [time.perf_counter()]
        loss = engine(**next(batches)).loss
        losses.append(loss.detach())
        marks.append(time.perf_counter())
        engine.backward(loss)
        marks.append(time.perf_counter())
        engine.step()
        marks.append(time.perf_counter())
        parts = [part + after - before for part, before, after in zip(parts, marks, marks[1:], strict=False)]
    mean_loss = float(torch.stack(losses).float().mean())  # waits for the device
    seconds = time.perf_counter() - started
    forward, backward, _ = parts
    return TimedStep(
        step=seconds, forward=forward, backward=backward, optimizer=seconds - forward - backward, loss=mean_loss
    )
