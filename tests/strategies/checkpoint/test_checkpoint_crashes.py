"""Saving that is killed, runs out of room, or loses a rank: the last published checkpoint is whole and loads."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint import loading, retention, safefile, saving
from strategies.checkpoint.saving import Target, Writing
from strategies.distributed.environment import Environment
from strategies.errors import BrokenFile
from tests.strategies import checkpoint_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

KILLS = 25
"""Per way of saving."""


def in_a_child(work: Callable[[int], object]) -> tuple[int, int]:
    """Fork a process that does `work` with the end of a pipe to write to; its id, and the end to read."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    try:
        torch.set_num_threads(1)
        work(theirs)
        os._exit(0)
    finally:
        os._exit(1)


def save_for_ever(engine: Any, directory: Path, *, asynchronous: bool) -> Callable[[int], None]:
    """Saves one step after the other, each with its number in every weight and state."""

    def work(pipe: int) -> None:
        while True:
            os.write(pipe, b".")
            engine._global_steps += 1
            checkpoint_bodies.fill(engine, engine.global_steps)
            engine.save_checkpoint(directory, {"step": engine.global_steps}, asynchronous=asynchronous, keep_last=2)

    return work


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.sweep(suite={"True"})
def test_killed_at_random_moments_the_last_published_checkpoint_loads(tmp_path: Path, asynchronous: bool) -> None:
    chance = random.Random(12)
    writer, reader = training_bodies.make_engine(Recipe()), training_bodies.make_engine(Recipe())
    for engine in (writer, reader):
        training_bodies.one_step(engine, 0)
    writer.save_checkpoint(tmp_path)
    began = time.monotonic()
    writer.save_checkpoint(tmp_path, keep_last=1)
    each = time.monotonic() - began
    interrupted, seen = 0, []
    for _ in range(KILLS):
        child, pipe = in_a_child(save_for_ever(writer, tmp_path, asynchronous=asynchronous))
        # Some moment of its first to sixth save, however busy the machine is.
        for _ in range(chance.randint(1, 6)):
            os.read(pipe, 1)
        time.sleep(chance.uniform(0, each))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pipe)
        interrupted += any(tmp_path.glob(".step-*"))
        path, state = reader.load_checkpoint(tmp_path)
        if state:
            seen.append(state["step"])
            assert str(path).startswith(f"{tmp_path}/step-{state['step']:08d}")
            assert checkpoint_bodies.values_of(reader) == {float(state["step"])}
            writer._global_steps = state["step"]
    assert seen == sorted(seen)
    assert seen[-1] > KILLS // 2, "most of them have saved some"
    assert interrupted >= KILLS // 4, "the kills came while something was being written"


def test_a_disk_that_is_full_is_one_line_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    training_bodies.one_step(engine, 0)
    good = engine.save_checkpoint(tmp_path)

    def work(pipe: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            engine.save_checkpoint(tmp_path)
        except BrokenFile as problem:
            os.write(pipe, str(problem).encode())

    child, pipe = in_a_child(work)
    message = os.read(pipe, 10_000).decode()
    os.close(pipe)
    assert os.waitpid(child, 0)[1] == 0
    assert message == f"{good}-2: cannot be written (File too large); make room, or name another directory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", good.name]
    assert loading.open_whole(good).path == good


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_one_rank_cannot_write_is_said_by_every_rank(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    recipe = Recipe(strategy="zero2", backend="native", world_size=2)
    of_ranks = ranks.run(checkpoint_bodies.full_disk_on_rank_1, recipe, str(tmp_path), asynchronous)
    line = "step-00000002: cannot be written (No space left on device); make room, or name another directory"
    assert [message for message, _, _ in of_ranks] == [f"{tmp_path}/{line}"] * 2
    assert [name for _, name, _ in of_ranks] == ["step-00000001"] * 2
    assert [after for _, _, after in of_ranks] == ["step-00000002"] * 2, "the next one is saved as ever"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def two_ranks(rank: int) -> Environment:
    return Environment(rank=rank, local_rank=rank, world_size=2, local_world_size=2, device=torch.device("cpu"))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    name = retention.begin(tmp_path, 3)
    return Target(directory=tmp_path, name=name, keep_last=None)


def test_a_checkpoint_is_published_when_every_rank_has_written(target: Target) -> None:
    def write(temporary: Path) -> dict[str, safefile.FileSum]:
        (temporary / f"rank{len(list(temporary.glob('rank*')))}").write_text("mine")
        return {}

    first = Writing(target, two_ranks(0), write)
    first.require_part()
    assert not target.path.exists()
    second = Writing(target, two_ranks(1), write)
    second.require_published()
    first.require_published()
    assert sorted(safefile.read(target.path)) == ["rank0", "rank1"]
    assert sorted(path.name for path in target.path.iterdir()) == ["checksums.json", "rank0", "rank1"]


def test_a_rank_that_never_writes_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_PATIENCE_SECONDS", 0.1)
    alone = Writing(target, two_ranks(0), lambda temporary: {})
    with pytest.raises(BrokenFile, match="rank 1 wrote no part of it; name a directory that all ranks share"):
        alone.require_published()
    assert not target.path.exists()


def test_rank_zero_does_not_wait_for_a_rank_that_gave_up(target: Target) -> None:
    def no_room(temporary: Path) -> dict[str, safefile.FileSum]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = Writing(target, two_ranks(0), lambda temporary: {})
    first.require_part()
    with pytest.raises(BrokenFile, match="No space left on device"):
        Writing(target, two_ranks(1), no_room).require_part()
    with pytest.raises(BrokenFile, match="rank 1 could not write its part"):
        first.require_published()
    assert not target.path.exists()
