"""A run's metrics and happenings, handed to experiment trackers by a process beside the ranks.

    python -m dsplan.diagnostics.tracking.feed DIRECTORY PARENT NAME...

That process reads the files of the run directory, so that training neither waits for a tracker nor ends with one. It
has the lowest priority, none of the variables that make a process a rank, and a thread for each tracker. What a tracker
has is in `tracker-NAME.json` of the run directory: a resumed run, or `dsplan track`, goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsplan.diagnostics.tracking.trackers import (
    KINDS,
    TrackedRun,
    Tracker,
    clean,
    figures,
    file_name,
    flags_of,
    flatten,
)
from hardware_db.errors import BrokenFile
from hardware_db.files import digest
from strategies.launch.launchers.process import import_path
from strategies.launch.run_lock import is_held
from strategies.run_directory.files import JOURNAL_FILE, SPEC_FILE, metrics_files, metrics_path, read_json, write_json
from strategies.run_directory.journal import read_journal
from strategies.run_directory.spec import LaunchSpec
from strategies.telemetry.follow import LineFollower
from strategies.telemetry.metrics import parse_row, step_number

LOG_FILE = "trackers.log"
"""What trackers' libraries print."""
_LOWEST_PRIORITY = 19
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
"""How long a run that is over waits for trackers that take nothing more."""
_SHORT_PATIENCE_SECONDS = 5.0
"""The same where somebody asked the run to stop."""
_LOSS_SECONDS = 5.0
"""How long a step of a rank without a loss, in a pipeline, waits for that of another rank."""
_MOST_PENDING = 20_000
_PAUSES = (5.0, 15.0, 60.0, 300.0)
"""Between attempts to reach a tracker that fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerState:
    """The part of a run that a tracker has, as `tracker-NAME.json`."""

    run: str = ""
    """What the tracker calls the run."""
    where: str = ""
    """Where a person finds it; empty before there is anything."""
    course: int = 0
    """The attempt that began anew or from a named checkpoint; each course is a run of its own for a tracker."""
    attempt: int = -1
    """Of the last step."""
    step: int = 0
    """The last one it has; 0 for none."""
    happenings: int = 0
    """Lines of the journal that it has."""
    problem: str = ""
    """Why it takes nothing, in one line; empty while it does."""
    finished: bool = False
    """Whether it has all of the run, up to its end."""


def state_path(directory: Path, name: str) -> Path:
    """Return where it is written how far a tracker is."""
    return directory / f"tracker-{name}.json"


def read_state(directory: Path, name: str) -> TrackerState:
    """Read how far a tracker is.

    Raises:
        BrokenFile: the file is damaged.
    """
    path = state_path(directory, name)
    if not path.exists():
        return TrackerState()
    try:
        return read_json(TrackerState, path)
    except BrokenFile:
        raise BrokenFile(path, "is damaged", f"remove it to give {name} the whole run again") from None


def tracked_by(directory: Path) -> dict[str, TrackerState]:
    """Return the trackers that have anything of a run."""
    states = {}
    for name in KINDS:
        with suppress(BrokenFile):
            state = read_state(directory, name)
            if state.where:
                states[name] = state
    return states


# The side of the command: start the process, say what becomes of it, and end it.


class Tracking:
    """The process that feeds trackers. `remarks()` may be called often; what it returns are lines for people.

    Raises:
        BrokenFile: the file of a tracker's state is damaged.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory, self._names = directory, tuple(names)
        self._process: subprocess.Popen[bytes] | None = None
        self._look_at = 0.0
        self._said = {name: {read_state(directory, name).where} for name in names}
        self._unsaid: list[str] = []
        self._has_ended = False

    def start(self) -> None:
        """Start it, once; with no names nothing is started."""
        if not self._names or self._process is not None:
            return
        command = [sys.executable, "-m", "dsplan.diagnostics.tracking.feed", str(self._directory), str(os.getpid())]
        try:
            for name, state in self._states().items():
                if state.problem:  # of an earlier process
                    write_json(state_path(self._directory, name), asdict(replace(state, problem="")))
            with (self._directory / LOG_FILE).open("ab") as log:
                # A session of its own: Ctrl-C leaves it what is still to be sent.
                self._process = subprocess.Popen(
                    [*command, *self._names],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                )
        except OSError as problem:  # a full disk, or a directory that is not to be written: training can do without
            self._unsaid.append(f"{self._directory}: nothing is tracked ({problem.strerror})")

    def remarks(self) -> list[str]:
        """Return what there is to say since the last call: where a run is tracked, and what keeps a tracker from it."""
        unsaid, self._unsaid = self._unsaid, []
        if self._process is None or self._has_ended or time.monotonic() < self._look_at:
            return unsaid
        self._look_at = time.monotonic() + _LOOK_SECONDS
        lines = [*unsaid, *self._news()]
        status = self._process.poll()
        if status is not None and not all(state.finished for state in self._states().values()):
            self._has_ended = True
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}, see {LOG_FILE}"
            lines.append(f"tracking has ended {how}; training continues, and {self._remedy()} sends what is missing")
        return lines

    def finish(self, *, in_a_hurry: bool = False) -> Iterator[str]:
        """Wait for what is still to be sent, while it is being sent, and end the process; gives lines for people."""
        if self._process is None:
            return
        patience = _SHORT_PATIENCE_SECONDS if in_a_hurry else _PATIENCE_SECONDS
        seen, until = self._states(), time.monotonic() + patience
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            if (states := self._states()) != seen and not in_a_hurry:
                seen, until = states, time.monotonic() + patience
        self.close()
        if not self._has_ended:
            yield from self._news()
            late = [
                name for name, state in self._states().items() if not state.finished and (state.where or state.problem)
            ]
            if late:
                yield f"{', '.join(late)} did not take all of the run; {self._remedy(late)} sends what is missing"

    def follow(self) -> Iterator[str]:
        """Yield lines for people until a process ends that does so by itself, with its run."""
        yield from self._unsaid
        while self._process is not None and self._process.poll() is None:
            yield from self._news()
            time.sleep(_LOOK_SECONDS / 4)
        yield from self.finish()

    def close(self) -> None:
        """End the process, and what trackers' libraries have started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _news(self) -> list[str]:
        lines = []
        for name, state in self._states().items():
            for text, line in (
                (state.where, f"tracked by {name}: {state.where}"),
                (state.problem, f"{name}: {state.problem}"),
            ):
                if text and text not in self._said[name]:
                    self._said[name].add(text)
                    lines.append(line)
        return lines

    def _states(self) -> dict[str, TrackerState]:
        states = {}
        for name in self._names:
            with suppress(BrokenFile):
                states[name] = read_state(self._directory, name)
        return states

    def _remedy(self, names: Sequence[str] | None = None) -> str:
        return f"dsplan track {self._directory} --to {','.join(names or self._names)}"


_OF_RANKS = ("ACCELERATE_", "GROUP_", "LOCAL_", "MASTER_", "MV2_", "NCCL_", "OMPI_", "PMI", "ROLE_", "TORCHELASTIC_")
_OF_RANK = ("RANK", "WORLD_SIZE", "NODE_RANK")


def _environment() -> dict[str, str]:
    """Return this process's environment without what makes a process a rank, or would have it take a GPU."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS) and name not in _OF_RANK
    }
    return {
        **kept,
        **import_path(Path(__file__).resolve().parents[3]),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "WANDB_CONSOLE": os.environ.get("WANDB_CONSOLE", "off"),
        "GIT_PYTHON_REFRESH": "quiet",
    }


# The side of the process: follow the files, and hand on what is new.


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Figures on their way."""

    attempt: int
    step: int
    """The step they are of, by whoever wrote them."""
    after: int
    """The last step of the run that was done when they were written; of a step's own row that step."""
    values: dict[str, float]
    is_step: bool
    """Whether it is the step's own row."""
    read_at: float
    """By the monotonic clock."""


class Feed:
    """Follows one run for one tracker. `is_over` says whether the run writes nothing more."""

    def __init__(self, directory: Path, name: str, is_over: Callable[[], bool]) -> None:
        self._directory, self._name, self._is_over = directory, name, is_over
        self._state = read_state(directory, name)
        self._tracker: Tracker | None = None
        self._rows = LineFollower(metrics_path(directory, 0))
        self._journal = LineFollower(directory / JOURNAL_FILE)
        self._others: dict[int, LineFollower] = {}
        self._losses: dict[int, float] = {}
        self._pending: deque[Item] = deque()
        self._machine: dict[str, float] = {}
        self._attempt = self._after = 0
        self._is_bare, self._counts_metrics = not (directory / SPEC_FILE).exists(), False
        self._written: TrackerState | None = None
        self._plan: Mapping[str, Any] | None = None
        self._journalled: list[Mapping[str, Any]] = []
        self._line = 0
        self._succeeded = True

    def run(self) -> None:
        """Feed the tracker until the run is over and it has all of it, or this process is ended."""
        with self._alone():
            course = _course(self._directory)
            if course != self._state.course:
                self._state = TrackerState(course=course)
            self._note(problem="", finished=False)
            self._begin_where_it_ended()
            failures = 0
            while True:
                is_over = self._is_over()  # asked before reading: whatever the run wrote is read below
                self._read()
                pause = _LOOK_SECONDS
                try:
                    self._send(is_over=is_over)
                    if is_over:
                        self._end()
                        return
                    failures = 0
                except Exception as error:  # a library's own, of a service or a network: it may pass
                    self._note(problem=_in_one_line(error))
                    if is_over and failures:
                        return
                    pause = _PAUSES[min(failures, len(_PAUSES) - 1)] if not is_over else _LOOK_SECONDS
                    failures += 1
                self._wait(pause)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (seconds > _LOOK_SECONDS and self._is_over()):
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the tracker's lock, which the kernel takes from a process that ends: one feeds a tracker at a time."""
        with (self._directory / f"tracker-{self._name}.lock").open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            self._state = read_state(self._directory, self._name)
            yield

    # Reading.

    def _begin_where_it_ended(self) -> None:
        """Read what is there, without what the tracker has."""
        self._read()
        attempt, step = self._state.attempt, self._state.step
        self._pending = deque(item for item in self._pending if item.attempt > attempt or item.after > step)
        self._journalled = [row for row in self._journalled if row["line"] > self._state.happenings]

    def _read(self) -> None:
        if len(self._pending) > _MOST_PENDING:
            return
        now = time.monotonic()
        for line in self._rows.read_lines():
            row = parse_row(line)
            if row is not None:
                self._take(row, now)
        for line in self._journal.read_lines():
            row = parse_row(line)
            if row is not None:
                self._line += 1
                if row.get("event") == "plan" and self._plan is None:
                    self._plan = row.get("plan")
                self._journalled.append({**row, "line": self._line})

    def _take(self, row: Mapping[str, Any], now: float) -> None:
        event = row.get("event")
        if event == "attempt":
            self._attempt = int(row["attempt"])
        elif event == "plan" and self._plan is None:
            self._plan = {name: value for name, value in row.items() if name != "event"}
        elif event == "machine":
            self._machine = figures(row, heading="machine")
        elif event == "step":
            self._counts_metrics = False
            self._after = step_number(row)
            # The newest attempt's row is the one that is part of the run.
            while self._pending and self._pending[-1].after >= self._after:
                self._pending.pop()
            values = {**figures(row), **self._machine, "train/attempt": self._attempt}
            self._machine = {}
            self._add(self._after, values, now, is_step=True)
        elif event in ("figures", "metrics"):
            # Where nobody launched a run and no engine counts steps, the script's own metrics are what there is.
            alone = self._is_bare and (self._after == 0 or self._counts_metrics)
            self._counts_metrics = alone
            step = int(row["step"])
            is_first = alone and step != self._after  # a script may report a step in several rows
            if alone:
                self._after = step
            self._add(step, figures(row), now, is_step=is_first)

    def _add(self, step: int, values: dict[str, float], now: float, *, is_step: bool) -> None:
        self._pending.append(
            Item(attempt=self._attempt, step=step, after=self._after, values=values, is_step=is_step, read_at=now)
        )

    # Sending.

    def _send(self, *, is_over: bool) -> None:
        if self._tracker is None:
            if not self._pending:
                return  # rank 0 may be on another node, or may never train
            self._tracker = self._open()
        kept_at = time.monotonic()
        while self._pending:
            item = self._pending[0]
            if self._is_to_go(item):
                values = self._with_loss(item, is_over=is_over)
                if values is None:
                    break
                self._tracker.log(values, item.step)
                if item.is_step:
                    self._remember(attempt=item.attempt, step=item.step)
            self._pending.popleft()
            if time.monotonic() - kept_at > _LOOK_SECONDS:
                kept_at = time.monotonic()
                self._note(problem="")
        self._report()
        self._note(problem="", finished=False)

    def _is_to_go(self, item: Item) -> bool:
        """Return whether the tracker is to get it: each step once, as it was run last where steps can be taken back."""
        state = self._state
        if item.after > state.step or state.attempt < 0:
            return True
        if item.attempt <= state.attempt:
            return not item.is_step
        if self._tracker is not None and self._tracker.takes_back and item.is_step:
            self._tracker.take_back(item.step)
            self._remember(attempt=item.attempt, step=item.step - 1)
            return True
        return False

    def _with_loss(self, item: Item, *, is_over: bool) -> dict[str, float] | None:
        """Return the figures, with another rank's loss where this one has none; None to wait for it."""
        if not item.is_step or "train/loss" in item.values:
            return item.values
        for rank, path in metrics_files(self._directory).items():
            if rank:
                self._others.setdefault(rank, LineFollower(path))
        for follower in self._others.values():
            for line in follower.read_lines():
                row = parse_row(line) or {}
                if row.get("event") == "step" and row.get("loss") is not None:
                    self._losses[step_number(row)] = float(row["loss"])
        loss = self._losses.pop(item.step, None)
        if loss is not None:
            return {**item.values, "train/loss": loss}
        waits = not is_over and time.monotonic() - item.read_at < _LOSS_SECONDS and bool(self._others)
        return None if waits else item.values

    def _open(self) -> Tracker:
        identity, state = _identity(self._directory), self._state
        course = f"-{state.course}" if state.course else ""
        spec = _spec(self._directory)
        run = TrackedRun(
            directory=self._directory,
            project=file_name(Path(spec.script).stem if spec is not None else "dsplan"),
            name=file_name(self._directory.name) + course,
            identity=identity + course,
            known=state.run,
            resumes_at=state.step + 1,
        )
        tracker = KINDS[self._name](run)
        last_step = tracker.last_step
        if last_step is not None and state.run:
            # What it says itself counts, after a process that was ended in between.
            self._remember(attempt=state.attempt, step=last_step)
        if not state.run:
            tracker.configure(_configuration(spec, self._plan))
        self._note(run=tracker.own_name or run.identity, where=tracker.where)
        return tracker

    def _report(self) -> None:
        """Hand on what the journal has that is new."""
        assert self._tracker is not None
        while self._journalled:
            row = self._journalled[0]
            if text := _happening(row):
                step = row.get("step") or self._state.step
                self._tracker.say(str(row["event"]), clean(text), int(step), int(row["line"]))
            if row.get("event") in ("ending", "end"):
                self._succeeded = row.get("outcome") == "completed"
            self._journalled.pop(0)
            self._remember(happenings=int(row["line"]))

    def _end(self) -> None:
        if self._tracker is not None:
            self._tracker.finish(succeeded=self._succeeded)
        self._note(problem="", finished=True)

    def _remember(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    def _note(self, **changes: Any) -> None:
        """Change the state, and write it where it is another."""
        self._remember(**changes)
        if self._state != self._written:
            self._written = self._state
            with suppress(OSError):  # a full disk: what is sent is sent
                write_json(state_path(self._directory, self._name), asdict(self._state))


def _in_one_line(error: Exception) -> str:
    text = " ".join(clean(str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _spec(directory: Path) -> LaunchSpec | None:
    """Return how the run was launched; None for the files of an engine that nobody launched."""
    path = directory / SPEC_FILE
    return LaunchSpec.load(path) if path.exists() else None


def _identity(directory: Path) -> str:
    spec = _spec(directory)
    return (spec.run_id if spec is not None else "") or digest(str(directory), 32)


def _course(directory: Path) -> int:
    """Return the attempt that began anew, or from a named checkpoint; what others did after it is given up."""
    attempts = [row for row in read_journal(directory) if row.get("event") == "attempt"]
    return int(attempts[-1].get("since") or 0) if attempts else 0


def _configuration(spec: LaunchSpec | None, plan: Mapping[str, Any] | None) -> dict[str, bool | int | float | str]:
    """Return what the run was asked to do and what was predicted of it, as names with values."""
    run: dict[str, Any] = {}
    if spec is not None:
        run = {"script": Path(spec.script).name, "run_directory": spec.run_directory, "processes": spec.processes}
        run = {"run": {**run, "arguments": flags_of(spec.arguments)}}
    kept = {name: value for name, value in (plan or {}).items() if name not in ("alternatives", "notes")}
    return flatten({**run, **kept})


def _happening(row: Mapping[str, Any]) -> str:
    """Return a line of the journal as a sentence, empty for those that trackers need not have."""
    event = row.get("event")
    if event == "alert":
        return f"rank {row.get('rank', 0)}: {row['message']}"
    if event == "ending":
        return f"attempt {row['attempt']} ended: {str(row['kind']).replace('_', ' ')}: {row.get('reason', '')}"
    if event == "decision":
        return str(row["why"])
    if event == "attempt" and row["attempt"]:
        return f"attempt {row['attempt']} begins, on {row.get('ranks')} ranks"
    if event == "end" and row.get("outcome") != "completed":
        return f"the run ended: {row.get('outcome')}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Feed the trackers that the command line names until the run is over; return the exit status."""
    directory, parent, names = Path(arguments[0]), int(arguments[1]), arguments[2:]
    with suppress(OSError):
        os.nice(_LOWEST_PRIORITY)
    from accelerate import PartialState

    PartialState(cpu=True)  # trackers ask it who they are; made by several threads at once it would be half made
    failed: list[str] = []

    def feed(name: str) -> None:
        try:
            Feed(directory, name, lambda: not is_held(directory) or os.getppid() != parent).run()
        except Exception:
            failed.append(name)
            raise

    threads = [threading.Thread(target=feed, args=(name,), name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
