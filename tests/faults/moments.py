"""What is done to a run from outside, at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from faulty_run import FaultyRun, wait_for
from ledger import Start

from strategies.launch.endings import STOPPED

STARTING = 0.25
"""Share of the moments that fall into the seconds in which processes start and load, instead of between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When something was done to a run, to which rank (None: to no single one), and whether it did what it should."""

    time: float
    rank: int | None = None
    hit: bool = True


Inflict = Callable[[FaultyRun, random.Random], "Moment | None"]
"""Waits for a random moment and does it; None where the run ended before."""


def kill_a_rank(run: FaultyRun, chance: random.Random) -> Moment | None:
    return _to_a_rank(run, chance, signal.SIGKILL)


def stop_a_rank(run: FaultyRun, chance: random.Random) -> Moment | None:
    """SIGSTOP: the process is there and does nothing, and no code of its own can notice."""
    return _to_a_rank(run, chance, signal.SIGSTOP)


def kill_the_agent(run: FaultyRun, chance: random.Random) -> Moment | None:
    if not _random_moment(run, chance) or (agent := run.agent()) is None:
        return None
    return _signal(run, agent, signal.SIGKILL)


def preempt(run: FaultyRun, chance: random.Random) -> Moment | None:
    """SIGTERM to the command, which saves and stops; then it is started again."""
    if not _random_moment(run, chance):
        return None
    moment = _signal(run, run.pid, signal.SIGTERM)
    status = run.wait()
    if status == 0:  # it came when the last step was made
        return None
    assert status == STOPPED, f"status {status}:\n{run.out}"
    _start_again(run)
    return moment


def kill_the_command(run: FaultyRun, chance: random.Random) -> Moment | None:
    """SIGKILL to the command, with which everything ends; then it is started again."""
    if not _random_moment(run, chance):
        return None
    moment = _signal(run, run.pid, signal.SIGKILL)
    run.wait()
    _start_again(run)
    return moment


def kill_a_rank_that_saves(run: FaultyRun, chance: random.Random) -> Moment | None:
    """SIGKILL while a checkpoint is being written. A hit has left an unfinished one behind."""
    if not _random_moment(run, chance, starting=0):
        return None
    if not run.until(lambda: bool(_unfinished(run)), "a checkpoint to begin", every=0.001):
        return None
    time.sleep(chance.uniform(0, 0.01))
    moment = _kill_one(run, chance, signal.SIGKILL)
    return moment and replace(moment, hit=bool(_unfinished(run)))


def fill_the_disk(run: FaultyRun, chance: random.Random) -> Moment | None:
    """No room for the next checkpoints, or for only a part of one, until some could not be written."""
    return _fill(run, chance, lambda: None)


def fill_the_disk_and_kill(run: FaultyRun, chance: random.Random) -> Moment | None:
    """A rank is killed while there is no room: the run goes on from an older checkpoint than the newest begun."""
    return _fill(run, chance, lambda: _kill_one(run, chance, signal.SIGKILL))


def _fill(run: FaultyRun, chance: random.Random, meanwhile: Callable[[], Moment | None]) -> Moment | None:
    if not _random_moment(run, chance, starting=0):
        return None
    began, killed = time.time(), None
    leave = chance.randrange(0, 400_000)
    with _ballast(run.checkpoints) as fill:
        if run.until(lambda: _told(run, began) or fill(leave), "a full disk to be told"):
            killed = meanwhile()
        time.sleep(chance.uniform(0, 2))
    return replace(killed or Moment(time=began), hit=_told(run, began))


@contextmanager
def small_disk(directory: Path, size: str = "24m") -> Iterator[None]:
    """A file system of its own at `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def _to_a_rank(run: FaultyRun, chance: random.Random, number: signal.Signals) -> Moment | None:
    return _kill_one(run, chance, number) if _random_moment(run, chance) else None


def _kill_one(run: FaultyRun, chance: random.Random, number: signal.Signals) -> Moment | None:
    ranks = run.ranks()
    if not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    return _signal(run, ranks[rank], number, rank)


def _signal(run: FaultyRun, pid: int, number: signal.Signals, rank: int | None = None) -> Moment | None:
    run.met = set(run.ranks().values())
    moment = Moment(time=time.time(), rank=rank)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    return moment


def _random_moment(run: FaultyRun, chance: random.Random, *, starting: float = STARTING) -> bool:
    """Wait for a moment of the attempt that runs or of the next; False where the run ended before it came."""
    if not run.until(lambda: len(run.ranks()) == 2 and not run.met & set(run.ranks().values()), "two new ranks"):
        return False
    known = set(run.ranks().values())
    if chance.random() < starting:
        time.sleep(chance.uniform(0, 4))
        return not run.ended()
    if not run.until(lambda: bool(_opened(run)), "the first step"):
        return False
    steps = int(run.settings["steps"])
    now = _opened(run)[-1].last_step if _opened(run) else 0
    target = chance.randint(now + 1, max(now + 1, min(steps - 2, now + steps // 6)))
    if not run.until(lambda: _highest_now(run) >= target or not known & set(run.ranks().values()), f"step {target}"):
        return False
    time.sleep(chance.uniform(0, 1.5 * float(run.settings["pause"])))
    return not run.ended()


def _opened(run: FaultyRun) -> list[Start]:
    """The attempts whose processes run and have come as far as the loop."""
    starts, alive = run.starts(), set(run.ranks().values())
    return [start for start in starts[-1:] if alive & set(start.processes)]


def _highest_now(run: FaultyRun) -> int:
    return max((start.last_step for start in _opened(run)), default=0)


def _start_again(run: FaultyRun) -> None:
    wait_for(lambda: not run.processes(), seconds=60)
    run.resume()


def _unfinished(run: FaultyRun) -> list[Path]:
    return list(run.checkpoints.glob(".step-*.tmp"))


def _told(run: FaultyRun, since: float) -> bool:
    """Whether a rank has told of a full disk; its file has every such alert, the journal one a minute."""
    lines = [line for path in run.run_directory.glob("metrics-rank*.jsonl") for line in path.read_text().splitlines()]
    return any(json.loads(line)["time"] >= since for line in lines if "No space left" in line)


@contextmanager
def _ballast(directory: Path) -> Iterator[Callable[[int], bool]]:
    """Gives a function that takes all room there but for so many bytes, also what became free meanwhile."""
    ballast = directory / "ballast"
    with ballast.open("wb") as file:

        def fill(leave: int) -> bool:
            disk = os.statvfs(directory)
            used, room = file.seek(0, os.SEEK_END), disk.f_bavail * disk.f_frsize - leave
            with suppress(OSError):  # somebody else was faster
                if room > 0:
                    os.posix_fallocate(file.fileno(), used, room)
            return False

        try:
            yield fill
        finally:
            ballast.unlink()
