"""Functions that the tests of supervision run on ranks: a small model trained without a command above it."""

from __future__ import annotations

import contextlib
import errno
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsplan.trainer import DistributedTrainer
from hardware_db.errors import DsplanError
from strategies.checkpoint import storage
from strategies.data.loader import LoaderSettings, ShardedLoader
from strategies.supervision import lineage
from strategies.supervision.failures import read_failure
from strategies.supervision.stopping import STOP_SIGNAL, Stopped
from strategies.supervision.supervision import Supervision
from tests.strategies import training_bodies
from tests.strategies.attempts import attempt_options
from tests.strategies.training_bodies import Recipe

SAMPLES = 36


def supervised(recipe: Recipe, directory: str, **options: Any) -> Any:
    """An engine with data under the options of an attempt, resumed where the run has a checkpoint."""
    STOP_SIGNAL.request = None
    run = Path(directory)
    run.mkdir(exist_ok=True)
    engine = training_bodies.make_engine(recipe)
    samples = [tuple(tensor[row] for tensor in training_bodies.batch_of(0)) for row in range(12)] * (SAMPLES // 12)
    engine.dataloader = ShardedLoader(samples, engine.configuration, engine.environment, LoaderSettings())  # type: ignore[arg-type]
    values = {"checkpoint_directory": str(run / "checkpoints"), "checkpoint_minutes": None, "hang_seconds": 0.0}
    engine.supervision = Supervision(engine, attempt_options(**{**values, **options}), run)
    engine.observers.append(engine.supervision)
    engine.supervision.resume()
    return engine


def train(engine: Any, passes: int, stop_at: int | None = None) -> list[tuple[int, float]]:
    """The script's naive loop: (step, loss) of every step that is made; rank 0 is asked to stop in step `stop_at`."""
    losses: list[tuple[int, float]] = []
    try:
        for _ in range(passes):
            for ids, targets in engine.dataloader:
                loss = engine(ids, targets) * (1 + torch.rand(()) / 100)  # shows a wrong random state
                engine.backward(loss)
                if stop_at is not None and engine.global_steps + 1 >= stop_at:
                    if engine.is_main:
                        STOP_SIGNAL.ask("preempted", 60.0)
                    time.sleep(0.3)  # the watchdogs look four times a second
                engine.step()
                losses.append((engine.global_steps, loss.item()))
    except Stopped:
        _stay(engine)
        losses.append((engine.global_steps, loss.item()))
    return losses


def whole(recipe: Recipe, directory: str, passes: int) -> list[tuple[int, float]]:
    return train(supervised(recipe, directory), passes)


def stopped(recipe: Recipe, directory: str, stop_at: int) -> list[tuple[int, float]]:
    return train(supervised(recipe, directory), 4, stop_at)


class _Batches(list[Any]):
    """A loader of a script's own, which fails in the pass and at the batch that it is told."""

    fails_at: tuple[int, int] | None = None
    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(super().__iter__()):
            if self.fails_at == (self.passes, number):
                raise OSError("the disk with the data went away")
            yield batch


def trained_by_a_trainer(recipe: Recipe, directory: str, fails_at: tuple[int, int] | None) -> dict[str, Any]:
    """The weights after three epochs over a loader that keeps no place, or where it failed."""
    engine = supervised(recipe, directory)
    engine.dataloader = None
    rank = engine.environment.rank
    own = [tuple(half[rank::2] for half in training_bodies.batch_of(step)) for step in range(5)]
    loader = _Batches(own)
    loader.fails_at = fails_at
    trainer = DistributedTrainer(engine, config={"save_dir": f"{directory}/own"})
    trainer.enable_fault_tolerance(checkpoint_interval=4)
    with contextlib.suppress(OSError):
        trainer.train(3, loader)
    return {"steps": engine.global_steps, **engine.state_dict()}


def saving(recipe: Recipe, directory: str, passes: int, every: int, **options: Any) -> list[str]:
    """The checkpoints that are there after some passes with one every `every` steps."""
    engine = supervised(recipe, directory, checkpoint_steps=every, **options)
    train(engine, passes)
    engine.wait_for_checkpoint()
    torch.distributed.barrier()
    return sorted(path.name for path in Path(directory, "checkpoints").glob("step-*"))


def saving_for_failures(recipe: Recipe, directory: str) -> tuple[float, float | None]:
    """Seconds between saves once one was timed where a failure comes every ten hours, and what this rank's took."""
    engine = supervised(recipe, directory, checkpoint_minutes=0.0001, mttf_hours=10.0)
    train(engine, 4)
    engine.wait_for_checkpoint()
    saves = engine.supervision._saves
    return saves._clock._interval.seconds, saves._save_seconds


def full_disk(recipe: Recipe, directory: str, asynchronous: bool) -> tuple[list[int], list[int]]:
    """Steps of the checkpoints before and after rank 1's disk is full for a while; training continues meanwhile."""
    engine = supervised(recipe, directory, checkpoint_steps=2)
    engine.supervision._saves._has_room = asynchronous
    train(engine, 1)
    engine.supervision._saves.finish()
    before, original = _steps(directory), storage.write

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if engine.environment.rank == 1:
        storage.write = full  # type: ignore[assignment]
    train(engine, 1)
    engine.supervision._saves.finish()
    storage.write = original
    torch.distributed.barrier()
    during = _steps(directory)
    assert during == before, (before, during)
    train(engine, 2)
    engine.supervision._saves.finish()
    torch.distributed.barrier()
    return before, _steps(directory)


def script_saves_after_a_full_disk(recipe: Recipe, directory: str, own: str) -> tuple[bool, bool]:
    """Return whether a save in the background failed on this rank, and whether the script's own after it is there."""
    engine = supervised(recipe, directory, checkpoint_steps=1000)
    train(engine, 1)
    original = storage.write

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if engine.environment.rank == 1:
        storage.write = full  # type: ignore[assignment]
    engine.supervision._saves.save(asynchronous=True)
    deadline = time.monotonic() + 100
    while engine.environment.rank == 1 and not engine._checkpoints.problem and time.monotonic() < deadline:
        time.sleep(0.01)
    has_failed = bool(engine._checkpoints.problem)
    storage.write = original
    path = engine.save_checkpoint(own)
    torch.distributed.barrier()
    return has_failed, path.is_dir()


def stops_where_rank_1_is_not_finite(recipe: Recipe, directory: str) -> tuple[Any, str]:
    """Return what a stop saves, and how it is told, when the last loss was bad on rank 1 alone."""
    engine = supervised(recipe, directory, checkpoint_steps=1000)
    train(engine, 1)
    engine.supervision._finite._bad_losses = engine.environment.rank
    return engine.supervision._save_in_time(engine.global_steps, time.monotonic() + 60)  # type: ignore[no-any-return]


def script_loads(recipe: Recipe, run: str, own: str) -> tuple[str, int, Any]:
    """Return what the script's own `load_checkpoint` gives in a run that resumes."""
    engine = supervised(recipe, run)
    path, state = engine.load_checkpoint(own)
    return str(path), engine.global_steps, state


def script_saves(recipe: Recipe, run: str, own: str, passes: int) -> int:
    """Train and save as a script does, with state of its own; the step."""
    engine = supervised(recipe, run)
    train(engine, passes)
    engine.save_checkpoint(own, client_state={"at": engine.global_steps})
    return int(engine.global_steps)


def blow_up(recipe: Recipe, directory: str) -> tuple[str, int]:
    """Return what is said where losses stay NaN, and how many checkpoints were made of it."""
    engine = supervised(recipe, directory, checkpoint_steps=1)
    message = ""
    try:
        for _ in range(20):
            for ids, targets in engine.dataloader:
                engine.backward(engine(ids, targets) * float("nan"))
                engine.step()
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
    return message, len(lineage.read(Path(directory)))


def _stay(engine: Any) -> None:
    """The ranks of a pool outlive their engines."""
    engine.supervision._watch._must_end = None


def _steps(directory: str) -> list[int]:
    names = [path.name for path in Path(directory, "checkpoints").glob("step-*")]
    return sorted(int(name.split("-")[1]) for name in names)


def too_late(recipe: Recipe, directory: str) -> tuple[str, int]:
    """Return what is said where the time is over before saving could begin, and how many checkpoints were made."""
    engine = supervised(recipe, directory)
    train(engine, 1)
    try:
        engine.supervision.stop("preempted", time.monotonic() - 1.0)
    except Stopped:
        _stay(engine)
        failure = read_failure(Path(directory), engine.environment.rank)
        assert failure is not None
        return str(failure["message"]), len(lineage.read(Path(directory)))
    raise AssertionError("it did not stop")


def script_reads_state(recipe: Recipe, directory: str, keeps: bool) -> tuple[list[int], Any]:
    """Steps of the automatic checkpoints of a script that reads `client_state`, and what a resumed engine has of it."""
    engine = supervised(recipe, directory, checkpoint_steps=1)
    engine.supervision._script_reads_state = True
    if keeps:
        engine.client_state["best"] = 0.5
    train(engine, 1)
    engine.supervision._saves.finish()
    torch.distributed.barrier()
    return _steps(directory), supervised(recipe, directory).client_state


def wandering_random_state(recipe: Recipe, directory: str) -> list[float]:
    """Numbers drawn after a pass over the data begins, which reading data must not move."""
    engine = supervised(recipe, directory)
    torch.manual_seed(11)
    iterator = iter(engine.dataloader)
    next(iterator)
    return torch.rand(2).tolist()


def is_resumed(recipe: Recipe, directory: str, options: dict[str, Any], own: str = "") -> tuple[int, str, str]:
    """The step at which training begins in a run with these options, what is said of it, and why it does not begin; the
    script loads what it has in `own`."""
    refusal = ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            engine = supervised(recipe, directory, **options)
            if own:
                engine.load_checkpoint(own)
            step = int(engine.global_steps)
            engine(*training_bodies.batch_of(0))
        except DsplanError as problem:
            step, refusal = -1, str(problem)
    return step, printed.getvalue(), refusal


def run_saving(recipe: Recipe, directory: str, passes: int, every: int, run_id: str) -> list[str]:
    """`saving` in a run that marks its checkpoints."""
    return saving(recipe, directory, passes, every, run_id=run_id)
