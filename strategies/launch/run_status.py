"""The status of runs in a few figures: state, steps, goodput, cost and alerts, for pages of many runs and for metrics.

A `RunFollower` reads each line of a run's journal and of one rank's metrics once, and of the other ranks the last rows,
so that a page of many runs is drawn again and again beside those that train. No torch.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hardware_db.datasheets import find_node_type
from hardware_db.errors import BrokenFile, UnknownName
from hardware_db.store.reports import Origin
from planner.cluster.nodes import price_per_gpu
from planner.types.plan import Plan
from strategies.launch.report import COMPLETED, INTERRUPTED, AttemptReport, counted_unit, earlier_attempts, outcome_of
from strategies.launch.run_lock import is_held
from strategies.run_directory.claim import saves_itself
from strategies.run_directory.files import JOURNAL_FILE, SPEC_FILE, heartbeat_path, metrics_files
from strategies.run_directory.journal import read_journal
from strategies.run_directory.request import ON_CPU
from strategies.run_directory.spec import ENDING_KINDS, STOPS, LaunchSpec
from strategies.supervision.hang_detection import HANG_SECONDS
from strategies.supervision.verdicts import read_heartbeat_file
from strategies.telemetry.alerts import AlertKind
from strategies.telemetry.follow import LineFollower
from strategies.telemetry.metrics import RECENT_STEPS, Pace, Row, pace_of, parse_row, step_number

State = Literal["running", "resumed", "stalled", "ended", "failed", "silent"]
STATES: tuple[State, ...] = ("running", "resumed", "stalled", "ended", "failed")
"""`resumed` goes on after a restart, `ended` completed or was stopped on purpose, `failed` is every other end."""
LISTED_STATES: tuple[State, ...] = (*STATES, "silent")
"""`silent` went on when it was last heard of, which is too long ago; a run cannot tell so of itself."""
TROUBLES: tuple[str, ...] = tuple(
    dict.fromkeys((*get_args(AlertKind), *(kind for kind in ENDING_KINDS if kind not in STOPS)))
)
"""Kinds of alerts, and of endings that were none on purpose."""

STALLED_SECONDS = 60.0
"""Without a sign of progress on any rank for so long, and for `STALLED_STEPS` steps, a run counts as stalled. Before an
attempt's first step it is the time after which `dsplan run` itself takes it for hung."""
STALLED_STEPS = 5
_SILENT_SECONDS = 30.0
"""A run whose lock this machine does not see goes on if a rank was heard of since: ranks write every five seconds."""
_TAIL_BYTES = 4096
"""Of another rank's metrics: some ten steps."""
_DEPTH = 3
"""Folders below the one that is listed in which runs are looked for."""
_CLOSING = ("end", "ending")
"""Lines of the journal that say how an attempt ended."""
_STEPS_FLAG = re.compile(r"--(?:max[-_]|train[-_]|num[-_]|total[-_])?(?:steps|iters)(?:=(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInUse:
    """The plan that a run follows, in a few words."""

    model: str
    strategy: str
    backend: str
    precision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment. Figures are those of all its attempts where nothing else is said."""

    directory: Path | None
    """None where a database tells of it."""
    name: str
    """Its directory, below the one that is listed."""
    state: State
    outcome: str
    """`completed`, `preempted`, `interrupted`, `out of memory`, `failed`; empty while the run goes on."""
    plan: PlanInUse | None
    usd_per_hour: float | None
    """The published price of a GPU-hour of the plan's node type; None where there is none."""
    device: Literal["gpu", "cpu"]
    ranks: int
    """Of the last attempt."""
    began: float
    """Seconds since 1970."""
    held_seconds: float
    """Seconds in which its ranks held their devices, pauses between restarts among them."""
    productive_seconds: float
    """Seconds of the steps that count: one that was run again after a restart counts once, a stall in one does not."""
    device_seconds: float
    """`held_seconds` times ranks, attempt by attempt."""
    step: int
    """The last one; a new attempt begins at its checkpoint."""
    steps: int | None
    """The number it shall have, where the script was told by a flag."""
    loss: float | None
    """Mean over the ranks that have one, each at its last step; None where it is no finite number."""
    step_seconds: float | None
    """Median of the last 20 steps of this attempt; of a run that has ended that of its report."""
    tokens_per_second: float | None
    """Of all ranks: the mean of the last steps over `step_seconds`; of a run that has ended those of its report."""
    peak_bytes: int | None
    """The highest peak of a rank in this attempt."""
    restarts: int
    checkpoint_step: int | None
    checkpoint_age_seconds: float | None
    """Since the last checkpoint, up to now or to the end of the run."""
    quiet_seconds: float | None
    """Since the last sign of progress; None where the run has ended."""
    alerts: Mapping[str, int] = field(default_factory=dict)
    """How often each of `TROUBLES` came, of those that did."""
    last_words: str = ""
    """The reason of the last ending, or the last alert."""
    origin: Origin | None = None
    """Whoever reported it, and on which machine; None where its files tell of it."""
    heard_seconds_ago: float | None = None
    """Since its last report; None where its files tell of it."""
    samples_per_second: float | None = None
    """As `tokens_per_second`; None where a database tells of it."""
    counted: Literal["tokens", "samples"] = "tokens"
    """The unit of its rate."""

    @property
    def units_per_second(self) -> float | None:
        """The rate in the unit that the run counts."""
        return self.samples_per_second if self.counted == "samples" else self.tokens_per_second

    @property
    def is_alive(self) -> bool:
        """True while ranks hold devices."""
        return self.state in ("running", "resumed", "stalled")

    @property
    def goodput(self) -> float | None:
        """The share of the time that went into steps that count."""
        return min(1.0, self.productive_seconds / self.held_seconds) if self.held_seconds > 0 else None

    @property
    def device_hours(self) -> float:
        """GPU-hours, or those of processes where ranks train on processors."""
        return self.device_seconds / 3600

    def usd(self, price: float | None = None) -> float | None:
        """Return the cost so far in dollars, at `price` per GPU-hour where it is given."""
        per_hour = self.usd_per_hour if price is None or self.device == "cpu" else price
        return None if per_hour is None else per_hour * self.device_hours


def requested_steps(arguments: Sequence[str]) -> int | None:
    """Return what a script was told by a flag such as `--max-steps`."""
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if match := _STEPS_FLAG.fullmatch(flag):
            given = match[1] or following
            return int(given) if given.isdecimal() and int(given) else None
    return None


def steps_to_reach(
    directory: Path, arguments: Sequence[str], *, attempts: int, step: int, is_completed: bool
) -> int | None:
    """Return how many steps a run shall have, as its script was told; None where `step` is not counted so.

    A script that loads a checkpoint of its own does fewer steps than it was told, in a later attempt or in the first.
    """
    steps = requested_steps(arguments)
    if steps is None or not saves_itself(directory):
        return steps
    return None if attempts > 1 or (is_completed and step < steps) else steps


# Many runs.


def run_directories(parent: Path) -> list[Path]:
    """Return the run directories in a folder and in the folders in it, three deep; links are followed.

    Raises:
        BrokenFile: it is no folder.
    """
    if not parent.is_dir():
        raise BrokenFile(parent, "is no folder", "name one that holds run directories of dsplan run")
    by_place = {path.resolve(): path for path in _search(parent, _DEPTH)}
    return sorted(by_place.values())


def _search(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / JOURNAL_FILE).is_file():
        yield directory
        return
    with suppress(OSError), os.scandir(directory) as entries:
        inside = [Path(entry.path) for entry in entries if depth and entry.is_dir()]
        for path in inside:
            yield from _search(path, depth - 1)


def in_order(runs: Iterable[RunStatus]) -> tuple[RunStatus, ...]:
    """Return runs as pages list them: those that go on first, the newest first of each."""
    return tuple(sorted(runs, key=lambda run: (not run.is_alive, -run.began)))


class RunsFollower:
    """The runs below a folder, looked at again and again; those that have not changed are not read again."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._runs: dict[Path, RunFollower] = {}

    def look(self) -> tuple[RunStatus, ...]:
        """Return every run as it is now: those that go on first, the newest first of each.

        Raises:
            BrokenFile: the folder is none.
        """
        paths = run_directories(self._parent)
        self._runs = {path: self._runs.get(path) or self._follower(path) for path in paths}
        return in_order(status for run in self._runs.values() if (status := run.look()) is not None)

    def _follower(self, path: Path) -> RunFollower:
        name = str(path.relative_to(self._parent))
        return RunFollower(path, name=path.resolve().name if name == "." else name)


# One run, read on from where the last look ended.


class RunFollower:
    """One run, looked at again and again."""

    def __init__(self, directory: Path, name: str = "") -> None:
        self._directory = directory
        self._name = name or directory.resolve().name
        self._journal_state: tuple[int, int] | None = None
        self._journal: list[dict[str, Any]] = []
        self._reports: tuple[AttemptReport, ...] = ()
        self._steps = _Steps(directory)
        self._spec: LaunchSpec | None = None
        self._ended: RunStatus | None = None

    def look(self) -> RunStatus | None:
        """Return the run as it is now; None where no attempt has begun, or none that this version reads."""
        try:
            has_news = self._read_journal()
            if self._ended is not None and not has_news and not is_held(self._directory):
                return self._ended
            status = self._status(time.time())
        except (AttributeError, KeyError, TypeError, ValueError, OSError, BrokenFile):
            return None  # files that another version wrote, or that somebody removes
        self._ended = None if status is None or status.is_alive else status
        return status

    def _read_journal(self) -> bool:
        """Return whether the journal has changed since the last look."""
        try:
            seen = (self._directory / JOURNAL_FILE).stat()
        except OSError:
            return False
        state = (seen.st_mtime_ns, seen.st_size)
        if state == self._journal_state:
            return False
        self._journal_state, self._journal = state, [row for row in read_journal(self._directory) if "event" in row]
        self._reports = earlier_attempts(self._directory, [self._steps.signs()])
        return True

    def _status(self, now: float) -> RunStatus | None:
        held = is_held(self._directory)  # before the metrics: whatever is read below was written until then
        self._steps.read(now)
        if not self._reports:
            return None
        spec, number, ranks = self._launch(), self._reports[-1].attempt, self._reports[-1].ranks
        beats = [read_heartbeat_file(heartbeat_path(self._directory, rank)) for rank in range(ranks)]
        heard = [beat for beat in beats if beat is not None and not beat.has_ended]
        is_closed = any(row["event"] in _CLOSING and row["attempt"] == number for row in self._journal)
        alive = held or (not is_closed and any(now - beat.time < _SILENT_SECONDS for beat in heard))
        if not alive and not is_closed:
            self._reports = earlier_attempts(self._directory, [self._steps.signs()])
        reports, last = self._reports, self._reports[-1]
        progress = [beat.time - beat.quiet_seconds for beat in heard]
        quiet = max(0.0, now - max([last.began, self._steps.stepped_at, *progress])) if alive else None
        outcome = "" if alive else _outcome(self._journal, last)
        until = now if alive else last.began + last.seconds
        spans = list(_spans(reports, until, is_alive=alive))
        plans = [report.plan for report in reports if report.plan is not None]
        plan = plans[-1] if plans else None
        device = _device(plan, spec)
        saved = self._last_save()
        alerts, last_words = self._alerts()
        pace = self._steps.pace() if alive else (self._measured_pace() or self._steps.pace())
        return RunStatus(
            directory=self._directory,
            name=self._name,
            state=self._state(outcome, quiet, spec, attempts=len(reports)),
            outcome=outcome,
            plan=None if plan is None else _in_a_few_words(plan),
            usd_per_hour=_published_price(plan) if device == "gpu" else None,
            device=device,
            ranks=last.ranks,
            began=reports[0].began,
            held_seconds=sum(seconds for seconds, _ in spans),
            productive_seconds=self._steps.seconds,
            device_seconds=sum(seconds * ranks for seconds, ranks in spans),
            step=self._steps.step,
            steps=steps_to_reach(
                self._directory,
                spec.arguments if spec else (),
                attempts=len(reports),
                step=self._steps.step,
                is_completed=outcome == COMPLETED.name,
            ),
            loss=self._steps.mean_loss(),
            step_seconds=pace.step_seconds,
            tokens_per_second=pace.tokens_per_second,
            samples_per_second=pace.samples_per_second,
            counted=counted_unit(plan, pace),
            peak_bytes=self._steps.peak_bytes(),
            restarts=len(reports) - 1,
            checkpoint_step=saved["step"] if saved else None,
            checkpoint_age_seconds=max(0.0, until - saved["time"]) if saved else None,
            quiet_seconds=quiet,
            alerts=alerts,
            last_words=last_words if alive or last.ending is None else last.ending.reason,
        )

    def _measured_pace(self) -> Pace | None:
        """Return the pace in the report of a run that has ended; None where no attempt was measured."""
        for row in reversed(self._journal):
            measured = row.get("event") == "measured" and row["measurement"]["measured"]
            if measured and measured["step_seconds"] is not None:
                return Pace(
                    step_seconds=measured["step_seconds"],
                    tokens_per_second=measured["tokens_per_second"],
                    samples_per_second=row.get("samples_per_second"),
                )
        return None

    def _launch(self) -> LaunchSpec | None:
        """Return how the run was launched; None where its directory does not say."""
        path = self._directory / SPEC_FILE
        if self._spec is None and path.exists():
            self._spec = LaunchSpec.load(path)
        return self._spec

    def _state(self, outcome: str, quiet: float | None, spec: LaunchSpec | None, *, attempts: int) -> State:
        if quiet is None:
            return "ended" if outcome in ("completed", "interrupted", "preempted") else "failed"
        patience = (spec.supervision.hang_seconds if spec else 0) or HANG_SECONDS
        step_seconds = self._steps.pace().step_seconds
        if self._steps.has_stepped and step_seconds is not None:
            patience = max(STALLED_SECONDS, STALLED_STEPS * step_seconds)
        if quiet > patience:
            return "stalled"
        return "running" if attempts == 1 else "resumed"

    def _last_save(self) -> Mapping[str, Any] | None:
        """Return the newest checkpoint that counts: a run that began anew has none of those before."""
        since = [row.get("since") or 0 for row in self._journal if row.get("event") == "attempt"]
        rows = [row for row in self._journal if row.get("event") == "saved" and row["attempt"] >= max(since, default=0)]
        return max(rows, key=lambda row: row["time"]) if rows else None

    def _alerts(self) -> tuple[dict[str, int], str]:
        """Return how often each kind came, and the words of the last."""
        counts, last = Counter[str](), ""
        for row in self._journal:
            event = row.get("event")
            if event in ("alert", "ending") and row.get("kind") in TROUBLES:
                counts[str(row["kind"])] += 1
                last = str(row.get("message") or row.get("reason") or "")
        return dict(counts), last


def _outcome(journal: Sequence[Mapping[str, Any]], last: AttemptReport) -> str:
    if last.ending is not None:
        return outcome_of(last.ending).name.replace("_", " ")
    ends = [row.get("outcome") for row in journal if row.get("event") == "end" and row.get("attempt") == last.attempt]
    return INTERRUPTED.name if INTERRUPTED.name in ends else COMPLETED.name


def _spans(reports: Sequence[AttemptReport], until: float, *, is_alive: bool) -> Iterator[tuple[float, int]]:
    """Yield seconds and ranks of every attempt, up to the next one where the same command began it."""
    for report, following in zip(reports, [*reports[1:], None], strict=True):
        end = report.began + report.seconds
        if following is not None and report.decision is not None and report.decision.continues:
            end = following.began
        elif following is None and is_alive:
            end = until
        yield max(0.0, end - report.began), report.ranks


def _device(plan: Plan | None, spec: LaunchSpec | None) -> Literal["gpu", "cpu"]:
    on_cpu = spec is not None and ON_CPU.items() <= spec.environment.items()
    return "cpu" if on_cpu or (plan is not None and plan.cluster.get("vendor") == "cpu") else "gpu"


def _in_a_few_words(plan: Plan) -> PlanInUse:
    chosen = plan.configuration
    return PlanInUse(
        model=str(plan.model.get("name", "")),
        strategy=chosen.strategy,
        backend=chosen.backend,
        precision=chosen.precision,
    )


def _published_price(plan: Plan | None) -> float | None:
    """Return what a GPU-hour of the plan's node type costs in dollars; None where nobody has published it."""
    if plan is None:
        return None
    with suppress(UnknownName):
        return price_per_gpu(find_node_type(str(plan.cluster.get("node_type") or "")))
    return None


# The rows of the ranks.


class _Steps:
    """The steps of a run: all of the lowest rank that writes any, the last ones of the others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._leader: int | None = None
        self._file: LineFollower | None = None
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        """Forget what was read."""
        self._numbers, self._each = array("q"), array("d")
        self._recent: deque[Row] = deque(maxlen=RECENT_STEPS)
        self._attempt: Row = {"event": "attempt", "attempt": 0}
        self._first: Row | None = None
        self._last: Row | None = None
        self._timed: Row | None = None
        self._peak = 0
        self._others: list[Row] = []
        self.seconds = 0.0
        self.stepped_at = 0.0

    @property
    def step(self) -> int:
        """The last one; 0 before the first."""
        return self._numbers[-1] if self._numbers else 0

    @property
    def has_stepped(self) -> bool:
        """True after the first step of the present attempt."""
        return self._first is not None

    def read(self, now: float) -> None:
        """Read what was written since the last look."""
        files = metrics_files(self._directory)
        sizes = {rank: path.stat().st_size for rank, path in files.items()}
        leader = min((rank for rank, size in sizes.items() if size), default=None)
        if leader is None:
            return
        is_first = leader != self._leader or sizes[leader] < self._size
        if is_first:
            self._leader, self._file = leader, LineFollower(files[leader])
            self._begin()
        before, self._size = self._last, sizes[leader]
        assert self._file is not None
        for line in self._file.read_lines():
            if (row := parse_row(line)) is not None:
                self._take(row)
        if self._last is before and not is_first:
            return
        self.stepped_at = 0.0 if is_first else now
        others = [self._last_of(path) for rank, path in files.items() if rank != leader]
        self._others = [row for row in others if row is not None]

    def _take(self, row: Row) -> None:
        event = row.get("event")
        if event == "attempt":
            self._attempt, self._first, self._peak = row, None, 0
            self._recent.clear()
            if saves_itself(self._directory):
                self._numbers, self._each = array("q"), array("d")  # nobody knows which steps are done again
        elif event == "step":
            self._first = self._first or row
            self._last = row
            self._add(step_number(row), float(row["seconds"]))
            self._recent.append(row)
            self._peak = max(self._peak, int(row.get("peak_bytes") or 0))
        elif isinstance(row.get("time"), (int, float)):
            self._timed = row

    def _add(self, number: int, seconds: float) -> None:
        """Add a step, which takes the place of itself and of those after it where they were done before.

        Of one that a stall made longer than `STALLED_STEPS` of those before it, so much counts.
        """
        counted, before = seconds, [row["seconds"] for row in self._recent]
        if len(before) >= STALLED_STEPS and seconds > STALLED_STEPS * min(before):
            counted = min(seconds, STALLED_STEPS * statistics.median(before))
        while self._numbers and self._numbers[-1] >= number:
            self._numbers.pop()
            self.seconds -= self._each.pop()
        self._numbers.append(number)
        self._each.append(counted)
        self.seconds += counted

    def _last_of(self, path: Path) -> Row | None:
        """Return another rank's last step; None where it is not about where the leader is, as of an earlier attempt."""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        rows = (row for line in reversed(lines) if '"step"' in line and (row := parse_row(line)) is not None)
        last = next((row for row in rows if row.get("event") == "step"), None)
        return last if last is not None and abs(step_number(last) - self.step) <= 1 else None

    def signs(self) -> list[Row]:
        """Return the rows that say how far the present attempt came, and when it was last heard of."""
        return [self._attempt, *(row for row in (self._timed, self._first, self._last) if row is not None)]

    def mean_loss(self) -> float | None:
        """Return the mean loss of the last step over the ranks that have one; None if it is no finite number."""
        losses = [row["loss"] for row in self._rows() if row.get("loss") is not None]
        mean = statistics.fmean(losses) if losses else math.nan
        return mean if math.isfinite(mean) else None

    def pace(self) -> Pace:
        """Return the pace of the present attempt's last steps; of ranks beside the leader the last alone is read."""
        return pace_of([list(self._recent), *([row] for row in self._others)] if self.has_stepped else [])

    def peak_bytes(self) -> int | None:
        """Return the highest peak in the present attempt: of the leader in any step, of others in the last."""
        return max([self._peak, *(int(row.get("peak_bytes") or 0) for row in self._others)]) or None

    def _rows(self) -> list[Row]:
        return [] if self._last is None else [self._last, *self._others]
