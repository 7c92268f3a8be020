"""The thread that watches a rank from inside: it spreads requests to stop, reports how far the rank is, ends a hang.

Two lines of defence. The thread itself sees a main thread that waits for ever; for one that never releases the
interpreter's lock, which stops this thread too, there is faulthandler's timer, which needs no lock and is set again at
every look. Other ranks of the same machine are asked for their stacks by SIGUSR2, which faulthandler answers without
the lock as well.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn

from hardware_db.notices import notice
from hardware_db.units import format_seconds
from strategies.run_directory import claim
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import heartbeat_path, stacks_path
from strategies.run_directory.heartbeat import BEAT_SECONDS, PULSE, Pulse, main_frame, script_line
from strategies.supervision.failures import Failure, describe_failure, exit_status, write_failure
from strategies.supervision.verdicts import (
    Heartbeat,
    Verdict,
    answer,
    judge,
    parted,
    read_heartbeat,
    read_verdict,
    silent_ranks,
    slowest,
)

if TYPE_CHECKING:
    from strategies.supervision.stopping import Board, Stopping

# Progress of this process, as far as another thread of it can see.
_BUSY = 0.05
"""Share of a processor from which on a thread, or the children together, are at work."""


class Activity:
    """Looks at the process now and then; every look reports whether something happened since the one before."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._main = threading.main_thread().ident
        self._beats, self._stack = -1, 0
        self._looked_at = time.monotonic()
        self._own_seconds = self._main_seconds()
        self._children_seconds: float | None = None

    def is_there(self, *, with_children: bool) -> bool:
        """Return whether the process got on since the last look; children are found on demand, as that is slow."""
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        beats, stack, seconds = self._pulse.beats, self._main_stack(), self._main_seconds()
        moved = beats != self._beats
        # Before the first step a script loads and downloads, which may take its time with little of the processor's.
        share = _BUSY if self._pulse.step else 0.0
        works = stack != self._stack and seconds - self._own_seconds >= share * passed
        self._beats, self._stack, self._own_seconds = beats, stack, seconds
        return moved or works or self._pulse.rests > 0 or self._children_work(passed, look=with_children)

    def _main_stack(self) -> int:
        """Return a number that changes when the main thread moves on to another instruction, in any of its frames."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        instructions = []
        while frame is not None:
            instructions.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return hash(tuple(instructions))

    def _main_seconds(self) -> float:
        if self._main is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time()
        return time.clock_gettime(time.pthread_getcpuclockid(self._main))

    def _children_work(self, passed: float, *, look: bool) -> bool:
        before, self._children_seconds = self._children_seconds, _seconds_of_children() if look else None
        if before is None or self._children_seconds is None:
            return False
        return self._children_seconds - before >= _BUSY * passed


def _seconds_of_children() -> float:
    import psutil  # `dsplan --help` reads this module's default

    total = 0.0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


HANG_SECONDS = 900.0
"""Without progress for so long, a run that names no time of its own is restarted: a step of the largest models, and a
checkpoint of them over a slow network, take minutes."""
_POLL_SECONDS = 0.25
_LOCK_SECONDS = 30.0
"""How much later than the thread faulthandler's timer ends a rank, so that other ranks can name it before."""
_PATIENT = 3.0
"""Where one rank works, those that wait for it wait this many times as long before it counts as a hang."""
_ASIDE_SECONDS = 3.0
"""What the other ranks get to write their stacks, before this one's end makes the launcher end them."""
_ALONE_SECONDS = 120.0
_LOOKS = 3
"""Heartbeats that are published between the two looks at all ranks from which a verdict is formed."""
_SILENT_LOOKS = 9
"""The same where a rank seems silent: a starved one may take long to publish its next heartbeat."""
_FILED = 5
"""Heartbeats of which one is left in the run directory, for people."""
_PARTED_SECONDS = 20.0
"""How long all ranks are quiet before those that wait in different calls have parted; a shorter limit is halved."""
_SETTLED_SECONDS = 1.0
"""How long a rank waits in a collective before another one that failed takes it for stuck there."""
_WAITING = ("torch.distributed.distributed_c10d", "strategies.backends.zero.collectives")
"""The modules in whose functions the main thread stands that waits in a collective."""
_LEAVE_SECONDS = 15.0
_HUNG, _PARTED = "hung", "parted"


class Hung(RuntimeError):
    """No progress for too long."""


class Watchdog(threading.Thread):
    """Watches one rank; `hang_seconds` 0: never calls anything a hang.

    Where nobody has claimed the run, in this attempt or before, a hang is reported, with the stacks, and does not end
    the process: a script that trains nothing may wait as long as it likes.
    """

    def __init__(self, directory: Path, rank: int, hang_seconds: float) -> None:
        super().__init__(name="dsplan watchdog", daemon=True)
        self.directory, self.rank, self._hang_seconds = directory, rank, hang_seconds
        options = AttemptOptions.load(directory)
        stacks = stacks_path(directory, rank, 0 if options is None else options.attempt)
        self._stacks: IO[str] = open(stacks, "a")  # noqa: SIM115 - open until the process ends
        self._activity = Activity(PULSE)
        self._active_at = self._beat_at = time.monotonic()
        self._has_reported = False
        self._claimed_before = claim.claimed_kind(directory)
        self._number, self._world_size = 0, 1
        self._board: Board | None = None
        self._stopping: Stopping | None = None
        self._must_end: tuple[float, int] | None = None
        self._ended = threading.Event()
        self._beat_seconds = min(BEAT_SECONDS, hang_seconds / 8) if hang_seconds else BEAT_SECONDS
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    @property
    def _only_reports(self) -> bool:
        return (claim.claimed() or self._claimed_before) in (None, "plain")

    def attach(self, board: Board, stopping: Stopping, world_size: int) -> None:
        """Watch the ranks together, which have met."""
        self._board, self._stopping, self._world_size = board, stopping, world_size
        # Peers can only end a rank that hangs from here on if they know its process.
        self._publish(0.0)

    def expect_end(self, status: int) -> None:
        """End the rank, which is about to leave, where that takes long, as in code that runs at the end."""
        self._must_end = (time.monotonic() + _LEAVE_SECONDS, status)

    def end(self) -> None:
        """Stop watching: what Python does at its end may take its time."""
        self._ended.set()
        self._publish(0.0)
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        """Look every quarter of a second until the process ends."""
        while not self._ended.wait(min(_POLL_SECONDS, self._beat_seconds)):
            now = time.monotonic()
            if self._must_end is not None and now > self._must_end[0]:
                os._exit(self._must_end[1])
            if self._stopping is not None:
                self._stopping.poll()
            if now - self._beat_at >= self._beat_seconds:
                self._look(now)

    def _look(self, now: float) -> None:
        was_stopped = now - self._beat_at > max(5.0, 4 * self._beat_seconds)
        self._beat_at = now
        quiet = now - self._active_at
        looks_further = 0 < self._hang_seconds < 4 * quiet
        if self._activity.is_there(with_children=looks_further) or was_stopped:
            self._active_at, quiet = now, 0.0
        self._publish(quiet)
        if self._have_parted(quiet) or not self._hang_seconds:
            return
        limit = self._hang_seconds + _LOCK_SECONDS
        faulthandler.dump_traceback_later(limit, file=self._stacks, exit=not self._only_reports)
        verdict = self._reported(quiet)
        if verdict is None and quiet >= self._limit:
            verdict = self._judge(quiet)
        if verdict is not None:
            self._give_up(verdict)

    def _have_parted(self, quiet: float) -> bool:
        """Return whether ranks wait for each other in different calls; then the process ends here."""
        limit = min(_PARTED_SECONDS, self._hang_seconds / 2 or _PARTED_SECONDS)
        if self._board is None:
            return False
        verdict = read_verdict(self._board.get(_PARTED))
        if verdict is None and quiet >= limit / 4:
            verdict = parted(self._heartbeats(self._board), limit)
        if verdict is None:
            return False
        if self._board.get(_PARTED) is None:
            self._board.put(_PARTED, verdict.text())
        self._give_up(verdict)
        return True

    def parted_at_once(self) -> Verdict | None:
        """Return why another rank was gone when this one needed it: the verdict where their calls differ, else None."""
        if self._board is None:
            return None
        until = time.monotonic() + _ASIDE_SECONDS
        before = self._heartbeats(self._board)
        while time.monotonic() < until:
            beats = self._heartbeats(self._board)
            own = beats.get(self.rank)
            beats[self.rank] = own and replace(own, meetings=tuple(PULSE.meetings), inside=True, quiet_seconds=math.inf)
            # Where the others stood before may be where they are no longer; one that was killed says nothing any more.
            others = [beat for rank, beat in beats.items() if rank != self.rank]
            is_known = all(beat and (beat.has_ended or beat != before[beat.rank]) for beat in others)
            own_verdict = parted(beats, _SETTLED_SECONDS if is_known else math.inf)
            if verdict := read_verdict(self._board.get(_PARTED)) or own_verdict:
                self._board.put(_PARTED, verdict.text())
                return verdict
            time.sleep(_POLL_SECONDS)
        return None

    @property
    def _limit(self) -> float:
        """Until the ranks have met they wait for each other with limits of their own."""
        return self._hang_seconds if self._board is not None else max(self._hang_seconds, _ALONE_SECONDS)

    def _publish(self, quiet: float) -> None:
        self._number += 1
        beat = Heartbeat(
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            number=self._number,
            step=PULSE.step,
            calls=PULSE.calls,
            section=PULSE.section,
            has_engine=PULSE.has_engine,
            quiet_seconds=quiet,
            time=time.time(),
            meetings=tuple(PULSE.meetings),
            inside=PULSE.depth > 0,
            waits_at=_waits_at(),
            has_ended=self._ended.is_set(),
        )
        text = beat.text()
        if self._number % _FILED == 1:
            with suppress(OSError):
                heartbeat_path(self.directory, self.rank).write_text(text)
        if self._board is not None:
            self._board.put(_beat(self.rank), text)

    def _judge(self, quiet: float) -> Verdict | None:
        """Return for whom the ranks wait, after a second look at them, or None if this rank has moved meanwhile."""
        if self._board is None and PULSE.waits_for:
            named = "rank " + ", ".join(map(str, PULSE.waits_for))
            return Verdict(behind=PULSE.waits_for, sentence=f"{named} does not answer, and the ranks have not met")
        if self._board is None:
            return Verdict(behind=(self.rank,), sentence=f"no progress for {format_seconds(quiet)}")
        before = now = self._heartbeats(self._board)
        for look in range(1, _SILENT_LOOKS + 1):
            time.sleep(self._beat_seconds)
            self._beat_at = time.monotonic()
            if self._activity.is_there(with_children=True):
                self._active_at = self._beat_at
                return None
            self._publish(self._beat_at - self._active_at)
            now = self._heartbeats(self._board)
            if reported := self._reported(quiet):
                return reported
            if look >= _LOOKS and not silent_ranks(before, now):
                break
        verdict = judge(before, now, quiet_seconds=self._hang_seconds)
        if verdict is None and quiet >= _PATIENT * self._hang_seconds:
            return slowest(now, quiet)
        return verdict

    def _reported(self, quiet: float) -> Verdict | None:
        """Return the verdict that another rank has reported, or what this rank has to answer; None if there is none."""
        verdict = None if self._board is None else read_verdict(self._board.get(_HUNG))
        if self._board is None or verdict is None or self.rank not in verdict.silent:
            return verdict
        return answer(verdict, self.rank, self._heartbeats(self._board), max(quiet, self._hang_seconds))

    def _heartbeats(self, board: Board) -> dict[int, Heartbeat | None]:
        return {rank: read_heartbeat(board.get(_beat(rank))) for rank in range(self._world_size)}

    def _give_up(self, verdict: Verdict) -> None:
        """Write the stacks and report for whom the ranks wait, once; then end, unless that is left to the script."""
        if self._has_reported:
            return
        if self._board is not None and self._board.get(_HUNG) is None:
            self._board.put(_HUNG, verdict.text())
        self._write_stacks(verdict.sentence)
        notice(f"rank {self.rank}: {verdict.sentence}; stacks in {self._stacks.name}")
        self._has_reported = True
        if not self._only_reports:
            self._end_hung(verdict)

    def _end_hung(self, verdict: Verdict) -> NoReturn:
        """Have silent ranks write their stacks, leave the last word, and end, with those that no SIGTERM ends."""
        silent = self._ask_for_stacks(verdict)
        failure = _failure_of(verdict, self.directory)
        write_failure(self.directory, self.rank, failure)
        time.sleep(_ASIDE_SECONDS)
        for beat in silent:
            # A stopped process takes no SIGTERM, and its launcher would wait for it to.
            if self._last_heartbeat(beat.rank) in (None, beat):
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)
        os._exit(exit_status(failure))

    def _write_stacks(self, why: str) -> None:
        try:
            self._stacks.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}: {why}\n")
            self._stacks.flush()
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        except OSError as problem:
            notice(f"{self._stacks.name}: the stacks of rank {self.rank} could not be written ({problem.strerror})")

    def _ask_for_stacks(self, verdict: Verdict) -> list[Heartbeat]:
        """Signal the ranks on this machine whose watchdogs do not answer; others write when they read the verdict."""
        silent: list[Heartbeat] = []
        for rank in verdict.silent:
            beat = self._last_heartbeat(rank)
            if rank != self.rank and beat is not None and beat.host == socket.gethostname():
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGUSR2)
                    silent.append(beat)
        return silent

    def _last_heartbeat(self, rank: int) -> Heartbeat | None:
        return None if self._board is None else read_heartbeat(self._board.get(_beat(rank)))


def begin_watching(directory: Path, rank: int, hang_seconds: float) -> Watchdog:
    """Start this process's watchdog at the first call, and return it."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(directory, rank, hang_seconds)
        _watchdog.start()
    return _watchdog


_watchdog: Watchdog | None = None


def explain_failure(failure: Failure, directory: Path) -> Failure:
    """Return a failure for which another rank was gone as one of the script, where the ranks' calls differed before."""
    verdict = _watchdog.parted_at_once() if _watchdog is not None and failure.kind in ("lost", "failed") else None
    return failure if verdict is None else _failure_of(verdict, directory)


def _failure_of(verdict: Verdict, directory: Path) -> Failure:
    failure = describe_failure("refused" if verdict.is_final else "hung", Hung(verdict.sentence), directory)
    return replace(failure, expected=True, behind=verdict.behind, silent=verdict.silent)


def _waits_at() -> str:
    """Return the script's line where the main thread waits in a collective; empty where it does not."""
    frame = main_frame()
    if frame is None or not is_waiting(frame):
        return ""
    return script_line(frame) or "the end of the script"


def is_waiting(frame: FrameType) -> bool:
    """Return whether a frame runs a function of a module that waits for other ranks."""
    modules = (sys.modules.get(name) for name in _WAITING)
    return any(module is not None and frame.f_globals is vars(module) for module in modules)


def _beat(rank: int) -> str:
    return f"beat-{rank}"
