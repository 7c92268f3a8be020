"""Functions that the tests of offload run on ranks.

A CPU's memory is the host's, so `apart` keeps device and host copies apart there as a GPU does, with copies that run in
threads.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from strategies.backends.zero.nvme import SwapFile
from strategies.backends.zero.offload import DOWN, UP, Offload, ThreadCopies
from strategies.backends.zero.settings import OffloadSettings
from strategies.engine.initialize import initialize
from strategies.telemetry.memory_report import reachable_tensors
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies import training_bodies, zero_bodies
from tests.strategies.training_bodies import Recipe

BUCKET = 1500
"""Elements; of the tiny model seven buckets, so that there are some on the way while others are stepped."""
_DEVICES = {"none": "none", "optimizer": "cpu", "all": "cpu", "nvme": "nvme"}


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """The place that states go to: `recipe.offload`, to a disk below `directory`, whole or by `ratio`."""

    recipe: Recipe
    directory: str = ""
    ratio: float = 1.0
    apart: bool = True

    def config(self) -> dict[str, Any]:
        optimizer = {"device": _DEVICES[self.recipe.offload], "ratio": self.ratio, "nvme_path": self.directory}
        zero = {"reduce_bucket_size": BUCKET, "offload_optimizer": optimizer}
        return {"gradient_clipping": self.recipe.clipping, "zero_optimization": zero}

    def engine(
        self, model: nn.Module | None = None, make: Any = None, copies: type[ThreadCopies] = ThreadCopies
    ) -> Any:
        torch.manual_seed(3)
        with _apart(copies) if self.apart and not torch.cuda.is_available() else nullcontext():
            engine, *_ = initialize(
                model=training_bodies.TinyModel() if model is None else model,
                optimizer=make or (lambda parameters: torch.optim.AdamW(parameters, lr=2e-3)),
                plan=self.recipe.plan(),
                config=self.config(),
            )
        return engine


@contextmanager
def _apart(copies: type[ThreadCopies]) -> Iterator[None]:
    def offload(settings: OffloadSettings, device: torch.device) -> Offload:
        return Offload(settings, copies() if settings.kind != "none" else None)

    with mock.patch("strategies.backends.zero.engine.offload_of", offload):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The results of a run; `places` says for every bucket where its states were."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    places: list[str] = field(default_factory=list)


def train(how: How) -> Run:
    engine = how.engine()
    losses = [training_bodies.one_step(engine, step) for step in range(how.recipe.steps)]
    places = [bucket.states_at.value for bucket in engine._pieces.buckets]
    return Run(losses=losses, parameters=training_bodies.whole_parameters(engine), places=places)


def train_odd(how: How, optimizer: str) -> dict[str, torch.Tensor]:
    """The model with everything awkward: unused parameters in some steps, two dtypes, shared ones."""
    torch.manual_seed(5)
    engine = how.engine(zero_bodies.OddModel(), zero_bodies.OPTIMIZERS[optimizer])
    rank, world = engine.environment.rank, engine.environment.world_size
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2, gamma=0.5)
    for step in range(6):
        part = zero_bodies._batch(step).chunk(world)[rank]
        engine.backward(zero_bodies._loss(engine, part, step, is_first=rank == 0) * world)
        engine.step()
        schedule.step()
    return training_bodies.whole_parameters(engine)


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a count of steps that its group keeps, and not its tensors."""

    whole_tensors = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


def counted(how: How) -> tuple[int, dict[str, torch.Tensor]]:
    """The count after training with the optimizer above, and the weights."""
    engine = how.engine(make=Counting)
    for step in range(how.recipe.steps):
        training_bodies.one_step(engine, step)
    return engine.optimizer.param_groups[0]["count"], training_bodies.whole_parameters(engine)


class Meetings:
    """Pairs of threads wait for each other, so that what both do then is seen to run at once; a wait that nobody joins
    breaks the barrier. Until `begin` nobody waits."""

    def __init__(self) -> None:
        self._barriers: dict[tuple[str, int], threading.Barrier] = {}
        self._counts: dict[str, int] = {}
        self._on = False

    def begin(self) -> None:
        self._on = True

    def next_of(self, what: str) -> int:
        """Return how many have come before, of one kind."""
        count = self._counts.get(what, 0)
        self._counts[what] = count + 1
        return count

    def meet(self, what: str, number: int, last: int = 3) -> None:
        """Wait for the other side of the meeting `number` of a kind, of which there are those from 0 to `last`."""
        if self._on and 0 <= number <= last:
            self._barriers.setdefault((what, number), threading.Barrier(2)).wait(timeout=60)


def copies_in_a_trace(how: How) -> list[tuple[str, float, float]]:
    """A step of four buckets. Backward waits in its last layer for the first gradient to be on its way down; the step
    of a bucket and the way up of the one before wait for each other."""
    meetings = Meetings()

    class Meeting(ThreadCopies):
        def _copy(self, label: str, source: torch.Tensor, target: torch.Tensor) -> None:
            with torch.profiler.record_function(label):
                if meetings._on:
                    meetings.meet(label, meetings.next_of(label), last=0 if label == DOWN else 2)
                target.copy_(source)

    model = Wide()
    engine = how.engine(model, copies=Meeting)

    def stepping(*_: Any) -> None:
        if meetings._on:
            meetings.meet(UP, meetings.next_of("step") - 1, last=2)

    model.blocks[0].register_full_backward_pre_hook(lambda *_: meetings.meet(DOWN, 0))
    engine.optimizer.register_step_pre_hook(stepping)
    return _traced(engine, meetings)


def disk_in_a_trace(how: How) -> list[tuple[str, float, float]]:
    """A step of four buckets, which waits for the next one's states to be read and the last one's to be written, as
    these wait for it."""
    meetings = Meetings()
    read, write = SwapFile.read, SwapFile.write

    def reading(file: SwapFile, start: int, memory: torch.Tensor) -> None:
        if meetings._on:
            meetings.meet("read", meetings.next_of("read") - 1, last=2)
        read(file, start, memory)

    def writing(file: SwapFile, start: int, memory: torch.Tensor) -> None:
        if meetings._on:
            meetings.meet("write", meetings.next_of("write"), last=2)
        write(file, start, memory)

    def stepping(*_: Any) -> None:
        if meetings._on:
            number = meetings.next_of("step")
            meetings.meet("read", number, last=2)
            meetings.meet("write", number - 1, last=2)

    with mock.patch.object(SwapFile, "read", reading), mock.patch.object(SwapFile, "write", writing):
        engine = how.engine(Wide())
        engine.optimizer.register_step_pre_hook(stepping)
        return _traced(engine, meetings)


def _traced(engine: Any, meetings: Meetings) -> list[tuple[str, float, float]]:
    """Name, begin and end of what all threads did in a step after two others, in microseconds."""
    x = torch.randn(64, Wide.WIDTH, requires_grad=True)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    for _ in range(2):
        step()
    meetings.begin()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as prof:
        step()
    return [(event.name, event.time_range.start, event.time_range.end) for event in prof.events() or ()]


class Wide(nn.Module):
    """Four layers of a quarter million weights, a bucket each."""

    WIDTH = 512

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def save_and_go_on(how: How, directory: str) -> list[float]:
    """Train three steps, save, and the losses of the next two."""
    engine = how.engine()
    for step in range(3):
        training_bodies.one_step(engine, step)
    engine.save_checkpoint(Path(directory))
    return [training_bodies.one_step(engine, step) for step in (3, 4)]


def load_and_go_on(how: How, directory: str) -> list[float]:
    """The losses of two steps from a checkpoint."""
    engine = how.engine()
    engine.load_checkpoint(Path(directory))
    return [training_bodies.one_step(engine, step) for step in (3, 4)]


def evaluated_and_changed(how: How) -> tuple[float, float, list[float]]:
    """A loss in evaluation and inside `whole_parameters`, and values written there, after another step at rate 0."""
    engine = how.engine()
    training_bodies.one_step(engine, 0)
    batch = [tensor.to(engine.device) for tensor in training_bodies.batch_of(1)]
    engine.eval()
    with torch.no_grad():
        evaluated = engine(*batch).item()
    with engine.whole_parameters(), torch.no_grad():
        inside = engine.module(*batch).item()
    with engine.whole_parameters(keeps_changes=True), torch.no_grad():
        engine.module.blocks[1].up.weight.fill_(0.25)
    engine.train()
    engine.optimizer.param_groups[0].update(lr=0.0)
    training_bodies.one_step(engine, 1)
    return evaluated, inside, training_bodies.whole_parameters(engine)["blocks.1.up.weight"].unique().tolist()


def live_between_steps(how: How) -> tuple[int, int]:
    """Live bytes after two steps, and the model's elements."""
    engine = how.engine(zero_bodies.WideModel(), lambda parameters: torch.optim.AdamW(parameters, lr=2e-3))
    x = torch.ones(1, 8)
    gc.collect()
    sharded_model = [tensor for tensor in reachable_tensors() if zero_bodies._belongs_to(tensor, engine)]
    with StorageTracker(sharded_model) as tracker:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        live = tracker.live_bytes
    return live, sum(parameter.numel() for parameter in engine.module.parameters())


def on_disk(how: How) -> tuple[list[str], int, int, bool]:
    """After two steps: the names below the directory, its space that is taken, the states' bytes, and whether the
    optimizer's tensors can be read."""
    before = _taken(how.directory)
    engine = how.engine(model=Wide())
    for _ in range(2):
        engine.backward(engine(torch.randn(8, Wide.WIDTH)).square().mean())
        engine.step()
    states = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in states)
    is_readable = all(bool(tensor.isfinite().all()) and bool(tensor.abs().sum() > 0) for tensor in states)
    return os.listdir(how.directory), _taken(how.directory) - before, size, is_readable


def _taken(directory: str) -> int:
    Path(directory).mkdir(parents=True, exist_ok=True)
    state = os.statvfs(directory)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def full_disk(how: How, limit: int) -> None:
    """A step where no file may be larger than `limit` bytes, which reads as a disk without room."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = how.engine(model=Wide())
    engine.backward(engine(torch.randn(8, Wide.WIDTH)).square().mean())
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        engine.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
