"""Runs to measure: a real model with random weights, trained by dsplan's engine on random words or on real text."""

from __future__ import annotations

import gc
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import psutil
import torch
import torch.distributed as dist
from torch import nn

from dsplan.diagnostics.bench.training import batch_for, build_model
from planner.types.plan_io import plan_from_dict
from planner.vocabulary import Task
from strategies.distributed.environment import join
from strategies.engine.base import Engine
from strategies.engine.initialize import initialize
from strategies.parallel.blocks import repeated_blocks
from strategies.telemetry.memory_report import reachable_tensors
from strategies.tracing.step.step import loss_of
from strategies.tracing.storage_tracker import StorageTracker

# Real text that every machine has: the sources of Python's standard library, as numbers of words.


_MODULES = ("argparse", "datetime", "inspect", "ipaddress", "pickle", "tarfile", "turtle", "typing")
_WORD = re.compile(rb"\w+|[^\w\s]")


@cache
def _words() -> tuple[int, ...]:
    folder = Path(os.__file__).parent
    sources = [(folder / f"{name}.py") for name in _MODULES]
    words = [word for source in sources if source.exists() for word in _WORD.findall(source.read_bytes())]
    return tuple(crc32(word) for word in words)


def text_batches(
    vocabulary: int, samples: int, length: int, *, seed: int, device: torch.device
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Endless micro-batches of `samples` x `length` words with themselves as labels; `seed` says where they begin.

    A word's number is its checksum modulo `vocabulary`: frequent words stay frequent, as in a real vocabulary.
    """
    words = torch.tensor(_words()) % vocabulary
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(words) - length, (samples, 1), generator=generator)
        batch = words[starts + torch.arange(length)].to(device)
        yield {"input_ids": batch, "labels": batch.clone()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A run to measure.

    `config` is a transformers config with its `model_type`, `plan` the object of the JSON contract; a process takes at
    most `memory_fraction` of its GPU.
    """

    config: Mapping[str, Any]
    task: Task
    plan: Mapping[str, Any]
    memory_fraction: float = 1.0


def measure_subject(subject: Subject) -> StepMemory:
    """Train the subject and measure a step in its steady state; called on every rank of the subject's group."""
    return measure_and_time(subject, 0)[0]


Made = tuple[nn.Module, Mapping[str, torch.Tensor]]
"""A model, and a micro-batch of its own."""


def measure_and_time(
    subject: Subject, steps: int, make: Callable[[Subject, torch.device], Made] | None = None
) -> tuple[StepMemory, tuple[float, ...]]:
    """Do the same, and time so many steps more, which all ranks begin together and nobody counts bytes in.

    `make` builds a model that is none of transformers'.
    """
    gc.collect()
    before = {weakref.ref(tensor.untyped_storage()) for tensor in reachable_tensors() if _has_storage(tensor)}
    device = join().device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(subject.memory_fraction, device)
    model, batch = (make or _build)(subject, device)
    engine, *_ = initialize(model=model, plan=plan_from_dict(subject.plan))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what building the model on the device left, which training does not need
    memory = measure_step(
        engine, batch, others=lambda tensor: _has_storage(tensor) and weakref.ref(tensor.untyped_storage()) in before
    )
    return memory, tuple(_seconds_of_step(engine, batch) for _ in range(steps))


def _build(subject: Subject, device: torch.device) -> Made:
    chosen = plan_from_dict(subject.plan).configuration
    model = build_model(subject.config, subject.task, chosen.attention, device)
    return model, batch_for(model, subject.task, chosen.micro_batch_size, chosen.sequence_length, device)


def _seconds_of_step(engine: Engine, batch: Mapping[str, torch.Tensor]) -> float:
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    _train_step(engine, batch)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.perf_counter() - started


def time_subject(subject: Subject, steps: int, threads: int = 1) -> tuple[TimedStep, ...]:
    """Train the subject on text and time `steps` steps in its steady state; called on every rank of its group."""
    gc.collect()
    torch.set_num_threads(threads)
    environment = join()
    if environment.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = plan_from_dict(subject.plan)
    chosen = plan.configuration
    model = build_model(subject.config, subject.task, chosen.attention, environment.device)
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    size = chosen.micro_batch_size, chosen.sequence_length
    batches = text_batches(vocabulary, *size, seed=environment.rank, device=environment.device)
    engine, *_ = initialize(model=model, plan=plan)
    return measure_times(engine, batches, steps)


def device_used_bytes() -> int:
    """Return what all processes use of this rank's GPU once this one is there, before its first tensor of a model."""
    device = join().device
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


# The true memory of an engine's step, phase by phase: what forward, loss, backward and optimizer step reach at most.
#
# A GPU's allocator keeps the peaks itself. On a CPU a `StorageTracker` counts every storage that an operation touches
# and every tensor that Python can reach; what neither shows it, such as DDP's buckets, it meets in the step before.
#
# The phases are those of a plan: `forward` ends when the model's last block returns, `loss` (final norm, head and loss)
# when the engine's forward does; `backward` and `step` are the engine's. With accumulation each phase is the largest of
# its micro-batches.


PHASES = ("forward", "loss", "backward", "step")
WARM_UP_STEPS = 2
"""Optimizer states appear in the first step, DeepSpeed's traces of stage 3 and DDP's rebuilt buckets in the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes on this rank in the steady state: alive before the step, and the peak of each phase.

    `states_bytes` are alive when the last backward pass has ended: weights, gradients and optimizer states.
    `reserved_bytes` is the allocator's reservation, `requested_bytes` the peak of what tensors asked it for, and
    `device_used_bytes` what all processes use of the device afterwards, all 0 on a CPU; `host_bytes` is this process's
    resident set.
    """

    resident_bytes: int
    phases: Mapping[str, int]
    states_bytes: int = 0
    reserved_bytes: int = 0
    requested_bytes: int = 0
    device_used_bytes: int = 0
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase."""
        return max(self.phases.values())


class Meter(Protocol):
    """Counts live bytes and the peak since `restart_peak`."""

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive."""

    @property
    def peak_bytes(self) -> int:
        """The most of them since the last `restart_peak`."""

    def restart_peak(self) -> None:
        """Begin the peak anew with what is alive."""


class CudaMeter:
    """torch's caching allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._requested: int | None = None

    @property
    def requested_bytes(self) -> int:
        """The most that tensors asked for since the first `restart_peak`."""
        return max(self._requested or 0, int(torch.cuda.memory_stats(self._device)["requested_bytes.all.peak"]))

    @property
    def live_bytes(self) -> int:
        """Bytes of the allocator's live tensors."""
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        """The most of them since the last `restart_peak`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def restart_peak(self) -> None:
        """Begin the allocator's peak anew."""
        self._requested = 0 if self._requested is None else self.requested_bytes
        torch.cuda.reset_peak_memory_stats(self._device)


def measure_step(
    engine: Engine,
    batch: Mapping[str, torch.Tensor],
    *,
    others: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> StepMemory:
    """Train on `batch` until the state is steady, then measure one optimizer step.

    `others` says which tensors are not this engine's (a CPU process may hold some from before).
    """
    for _ in range(WARM_UP_STEPS - 1):
        _train_step(engine, batch)
    gc.collect()
    if engine.device.type != "cuda":
        tracker = StorageTracker(tensor for tensor in reachable_tensors() if not others(tensor))
        return _measured(engine, batch, tracker, tracker)
    meter = CudaMeter(engine.device)
    measured = _measured(engine, batch, meter, nullcontext())
    free, total = torch.cuda.mem_get_info(engine.device)
    reserved = torch.cuda.max_memory_reserved(engine.device)
    requested = meter.requested_bytes
    return replace(measured, reserved_bytes=reserved, requested_bytes=requested, device_used_bytes=total - free)


def _measured(
    engine: Engine, batch: Mapping[str, torch.Tensor], meter: Meter, counting: AbstractContextManager[object]
) -> StepMemory:
    with counting:
        _train_step(engine, batch)  # the last of the warm-up, in which the meter meets what lives from step to step
        resident = meter.live_bytes
        peaks = PhasePeaks(meter)
        with peaks.following(engine.module):
            _train_step(engine, batch, peaks)
    host = psutil.Process().memory_info().rss
    return StepMemory(resident_bytes=resident, phases=peaks.peaks, states_bytes=peaks.before["step"], host_bytes=host)


def _train_step(engine: Engine, batch: Mapping[str, torch.Tensor], peaks: PhasePeaks | None = None) -> None:
    """One optimizer step, the loop of HF Trainer: outputs dropped, the loss kept."""
    enter = peaks.enter if peaks is not None else lambda phase: None
    steps = engine.configuration.gradient_accumulation_steps
    if engine.configuration.pp > 1:  # one call, whose micro-batches are in several phases at once
        enter("step")
        engine.train_batch({name: values.repeat(steps, *[1] * (values.dim() - 1)) for name, values in batch.items()})
        enter("")
        return
    for _ in range(steps):
        enter("forward")
        loss = loss_of(engine(**batch))
        enter("backward")
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            enter("step")
        engine.step()
    enter("")


class PhasePeaks:
    """The peak of each phase that was entered, and what was alive when one was entered last."""

    def __init__(self, meter: Meter) -> None:
        self.peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.before: dict[str, int] = {}
        self._meter = meter
        self._phase = ""

    def enter(self, phase: str) -> None:
        """End the present phase and begin another; the name of the present one changes nothing."""
        if phase == self._phase:
            return
        if self._phase:
            self.peaks[self._phase] = max(self.peaks[self._phase], self._meter.peak_bytes)
        self._phase = phase
        self.before[phase] = self._meter.live_bytes
        self._meter.restart_peak()

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Find where the forward pass of the blocks ends and the loss begins."""
        blocks = repeated_blocks(module)
        hooks = [blocks[-1].register_forward_hook(self._block_returns)] if blocks else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _block_returns(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._phase == "forward":  # not where activation checkpointing runs it again
            self.enter("loss")


# The time of an engine's steps on this rank: whole, and of forward, backward and optimizer.


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
