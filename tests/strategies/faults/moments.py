"""Faults that come to a run from outside, at moments that are drawn before it begins."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from strategies.checkpoint.retention import published
from strategies.run_directory.files import LINEAGE_FILE
from strategies.run_directory.spec import STOPPED
from tests.strategies.faults.faulty_run import FaultyRun, wait_for
from tests.strategies.faults.ledger import progress


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """The time to do something: between steps, or in the seconds in which processes start and load."""

    step: int  # one that a rank has begun to make
    checkpoints: int = 0  # how many steps have to be saved by then
    is_start: bool = False  # instead: while the ranks of the attempt that begins next start


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Something that was done to a run."""

    time: float  # seconds since 1970
    rank: int | None = None  # to which rank, None: to no single one
    hit: bool = True  # whether it did what it should
    goes_on_from: int | None = None  # the step from which the next attempt has to resume, None: any
    told: str = ""  # a regular expression for the line that the command has to print because of it


Inflict = Callable[[FaultyRun, When, random.Random], "Moment | None"]
"""Waits for the time and does it; returns None if the run ended before."""


def kill_a_rank(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    return _kill_one(run, chance, signal.SIGKILL) if _arrives(run, when, chance) else None


def stop_a_rank(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """SIGSTOP: the process is there and does nothing, and no code of its own can notice."""
    return _kill_one(run, chance, signal.SIGSTOP) if _arrives(run, when, chance) else None


def kill_the_agent(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    if not _arrives(run, when, chance) or (agent := run.agent()) is None:
        return None
    return _signal(run, agent, signal.SIGKILL)


def preempt(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """SIGTERM to the command, which saves and stops; then it is started again."""
    if not _arrives(run, when, chance):
        return None
    moment = _signal(run, run.pid, signal.SIGTERM)
    status = run.wait()
    if status == 0:  # it came when the last step was made
        return None
    assert status == STOPPED, f"status {status}:\n{run.out}"
    _start_again(run)
    return moment


def kill_the_command(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """SIGKILL to the command, with which everything ends; then it is started again."""
    if not _arrives(run, when, chance):
        return None
    moment = _signal(run, run.pid, signal.SIGKILL)
    run.wait()
    _start_again(run)
    return moment


def kill_a_rank_that_saves(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """SIGKILL while a checkpoint is being written. A hit has left an unfinished one behind."""
    if not _arrives(run, when, chance):
        return None
    if not run.until(lambda: bool(_unfinished(run)), "a checkpoint to begin", every=0.001):
        return None
    time.sleep(chance.uniform(0, 0.01))
    moment = _kill_one(run, chance, signal.SIGKILL)
    return moment and replace(moment, hit=bool(_unfinished(run)))


def fill_the_disk(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """No room for the next checkpoints, or for only a part of one, until some could not be written."""
    return _fill(run, when, chance, lambda: None)


def fill_the_disk_and_kill(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """A rank is killed while there is no room: the run resumes from an older checkpoint than the newest begun."""
    return _fill(run, when, chance, lambda: _kill_one(run, chance, signal.SIGKILL))


def _fill(run: FaultyRun, when: When, chance: random.Random, meanwhile: Callable[[], Moment | None]) -> Moment | None:
    if not _arrives(run, when, chance):
        return None
    began, killed = time.time(), None
    leave = chance.randrange(0, 400_000)
    with _ballast(run.checkpoints) as fill:
        if run.until(lambda: _report_line(run, began) or fill(leave), "a full disk to be told"):
            killed = meanwhile()
        time.sleep(chance.uniform(0, 2))
    return replace(killed or Moment(time=began), hit=_report_line(run, began))


def damage_a_checkpoint(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """A file of the newest checkpoint is spoilt, emptied, cut or lost, and at once a rank is killed."""

    def spoil(whole: list[Path]) -> Moment:
        path = chance.choice(sorted(path for path in whole[0].rglob("*") if path.is_file() and path.stat().st_size))
        chance.choice((_flip, _cut, _empty, _lose))(path, chance)
        run.damaged.add(whole[0].stat().st_ino)
        told = rf"{re.escape(str(whole[0]))}(?![-\d]).*; trying the one before"
        return Moment(time=time.time(), goes_on_from=_step_of(whole[1]), told=told)

    return _spoil_and_kill(run, when, chance, spoil)


def damage_the_list(run: FaultyRun, when: When, chance: random.Random) -> Moment | None:
    """The list of checkpoints is lost or its last line cut, as by a machine that failed, and a rank is killed."""

    def spoil(whole: list[Path]) -> Moment:
        path = run.run_directory / LINEAGE_FILE
        lines = path.read_bytes().splitlines(keepends=True)
        if chance.random() < 0.25:
            path.unlink()
        else:
            os.truncate(path, sum(map(len, lines)) - chance.randrange(2, len(lines[-1])))
        told = rf"{re.escape(str(path))} .*of step [\d, ]*\b{_step_of(whole[0])}\b.* are there; they count"
        return Moment(time=time.time(), goes_on_from=_step_of(whole[0]), told=told)

    return _spoil_and_kill(run, when, chance, spoil)


def _spoil_and_kill(
    run: FaultyRun, when: When, chance: random.Random, spoil: Callable[[list[Path]], Moment]
) -> Moment | None:
    """Spoil what a run resumes from while its ranks stand still between two checkpoints, so that none comes between,
    and kill one of them. `spoil` gets the whole checkpoints, newest first, two at least."""
    if not _arrives(run, when, chance):
        return None
    while run.until(lambda: _is_between_checkpoints(run), "two whole checkpoints and none being written"):
        with _standing_still(run.ranks()):
            if not _is_between_checkpoints(run):
                continue
            moment = spoil(_whole(run))
            killed = _kill_one(run, chance, signal.SIGKILL)
            return killed and replace(moment, rank=killed.rank)
    return None


def _is_between_checkpoints(run: FaultyRun) -> bool:
    whole, path = _whole(run), run.run_directory / LINEAGE_FILE
    listed = path.read_text() if path.exists() else ""
    return len(whole) > 1 and not _unfinished(run) and str(whole[0]) in listed and len(run.ranks()) == 2


@contextmanager
def _standing_still(ranks: dict[int, int]) -> Iterator[None]:
    for pid in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(0.02)
    try:
        yield
    finally:
        for pid in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _whole(run: FaultyRun) -> list[Path]:
    """The complete checkpoints that were not damaged, newest first."""
    complete = sorted(published(run.checkpoints), key=lambda path: (_step_of(path), path.stat().st_mtime), reverse=True)
    return [path for path in complete if path.stat().st_ino not in run.damaged]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(1, path.stat().st_size))


def _empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def _lose(path: Path, chance: random.Random) -> None:
    path.unlink()


@contextmanager
def small_disk(directory: Path, size: str = "24m") -> Iterator[None]:
    """A file system of its own at `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def _arrives(run: FaultyRun, when: When, chance: random.Random) -> bool:
    """Wait until it is time, in an attempt that began after the last fault; False where the run ended before."""
    if not run.until(lambda: len(run.ranks()) == 2 and not run.met & set(run.ranks().values()), "two new ranks"):
        return False
    if when.is_start:
        time.sleep(chance.uniform(0, 4))
        return not run.ended()
    if not run.until(lambda: run.has_opened() and _is_reached(run, when), str(when)):
        return False
    time.sleep(chance.uniform(0, 1.5 * float(run.settings["pause"])))
    return not run.ended()


def _is_reached(run: FaultyRun, when: When) -> bool:
    now = progress(run.starts(), time.time())
    return now.step >= when.step and now.checkpoints >= when.checkpoints


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


def _start_again(run: FaultyRun) -> None:
    wait_for(lambda: not run.processes(), seconds=60)
    run.resume()


def _unfinished(run: FaultyRun) -> list[Path]:
    return list(run.checkpoints.glob(".step-*.tmp"))


def _report_line(run: FaultyRun, since: float) -> bool:
    """Return whether a rank has told of a full disk; its file has every such alert, the journal one a minute."""
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
