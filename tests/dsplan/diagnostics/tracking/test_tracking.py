"""Trackers get each step of a run once, whatever ends in between, and nothing that ends the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dsplan.diagnostics.tracking import feed as tracking
from dsplan.diagnostics.tracking import trackers
from dsplan.diagnostics.tracking.feed import Feed, Tracking, read_state, state_path
from dsplan.diagnostics.tracking.trackers import TrackedRun, Tracker
from hardware_db.errors import BrokenFile
from strategies.launch import options
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.run_lock import RunLock
from strategies.run_directory.files import metrics_path
from strategies.run_directory.journal import Journal, append_line
from strategies.run_directory.spec import LaunchSpec
from tests.dsplan.cli import Cli
from tests.strategies.telemetry.rows import step_row


class Notebook(Tracker):
    """A tracker that keeps in memory what it gets, and fails as often as `failures` says."""

    runs: ClassVar[dict[str, Notebook]] = {}
    failures: ClassVar[int] = 0

    def open(self) -> Any:
        return self

    @property
    def where(self) -> str:
        return "memory"

    @classmethod
    def of(cls, identity: str) -> Notebook:
        return cls.runs[identity]

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        before = self.runs.get(run.identity)
        self.steps: list[tuple[int, Mapping[str, float]]] = before.steps if before else []
        self.notes: list[str] = before.notes if before else []
        self.configuration: Mapping[str, Any] = before.configuration if before else {}
        self.succeeded: bool | None = None
        self.runs[run.identity] = self

    def configure(self, values: Mapping[str, Any]) -> None:
        self.configuration = values

    def log(self, values: Mapping[str, float], step: int) -> None:
        if Notebook.failures and step == 3:
            Notebook.failures -= 1
            raise ConnectionError("no route\nto host")
        self.steps.append((step, values))

    def say(self, title: str, text: str, step: int, number: int) -> None:
        self.notes.append(f"{title} {step}: {text}")

    def finish(self, *, succeeded: bool) -> None:
        self.succeeded = succeeded


class Erasable(Notebook):
    """One whose steps can be taken back."""

    takes_back = True

    def take_back(self, step: int) -> None:
        self.steps[:] = [kept for kept in self.steps if kept[0] < step]


@pytest.fixture(autouse=True)
def notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notebook, "runs", {})
    monkeypatch.setattr(Notebook, "failures", 0)
    monkeypatch.setattr(tracking, "KINDS", {"notebook": Notebook, "erasable": Erasable})
    monkeypatch.setattr(tracking, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(tracking, "_PAUSES", (0.0,))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    arguments = ("--lr", "0.1", "--hub-token", "hf_secret", "--bf16", "--name=\x1b[31m<b>")
    LaunchSpec(
        script="/x/train.py",
        arguments=arguments,
        processes=2,
        run_directory=str(directory),
        supervision=DEFAULT_SUPERVISION,
        run_id="abc",
    ).save()
    Journal(directory).append("attempt", 0, ranks=2, since=0)
    return directory


def write(directory: Path, *rows: Mapping[str, Any], rank: int = 0) -> None:
    for row in rows:
        append_line(metrics_path(directory, rank), (json.dumps(row) + "\n").encode())


def attempt(number: int) -> dict[str, Any]:
    return {"event": "attempt", "attempt": number}


def steps(numbers: range, **figures: Any) -> list[dict[str, Any]]:
    """Rows of an attempt that resumes before the first of `numbers`, counted from 1."""
    return [step_row(index, global_step=number, **figures) for index, number in enumerate(numbers)]


def fed(directory: Path, name: str, *happenings: Callable[[], object]) -> None:
    """Feed a tracker; before each look but the first something more happens, and then the run is over."""
    waiting = iter(happenings)

    def is_over() -> bool:
        following: Callable[[], object] | None = next(waiting, None)
        if following is not None:
            following()
        return following is None

    Feed(directory, name, is_over).run()


def seen(name: str = "abc") -> list[int]:
    return [step for step, _ in Notebook.of(name).steps]


def test_a_row_becomes_figures_by_name(run: Path) -> None:
    machine = {"event": "machine", "time": 1.0, "cpu_percent": 50.0}
    own = {"event": "metrics", "step": 700, "accuracy": 0.5}
    write(run, attempt(0), *steps(range(1, 2), peak_bytes=None), machine, *steps(range(2, 3), peak_bytes=7), own)
    fed(run, "notebook")
    common = {"train/loss": 2.0, "seconds/seconds": 1.0, "train/samples": 4, "train/tokens": 256, "train/attempt": 0}
    assert Notebook.of("abc").steps == [
        (1, common),
        (2, {**common, "memory/peak_bytes": 7, "machine/cpu_percent": 50.0}),
        (700, {"train/accuracy": 0.5}),
    ]
    assert read_state(run, "notebook").finished


def test_the_plan_and_the_flags_of_the_script_are_its_configuration(run: Path) -> None:
    plan = {"plan": {"strategy": "fsdp", "tp": 2}, "memory": {"peak_allocated_bytes": 5}, "notes": ["long"]}
    Journal(run).append("plan", 0, plan=plan)
    write(run, attempt(0), *steps(range(1, 2)))
    fed(run, "notebook")
    configuration = Notebook.of("abc").configuration
    assert configuration["plan.strategy"] == "fsdp"
    assert (configuration["plan.tp"], configuration["memory.peak_allocated_bytes"]) == (2, 5)
    assert (configuration["run.arguments.lr"], configuration["run.arguments.bf16"]) == ("0.1", "true")
    assert configuration["run.arguments.name"] == " [31m<b>"
    assert "hf_secret" not in str(configuration)


@pytest.mark.parametrize(("name", "losses"), [("notebook", [2.0] * 5 + [1.0] * 2), ("erasable", [2.0] * 3 + [1.0] * 4)])
def test_a_restart_gives_each_step_once(run: Path, name: str, losses: list[float]) -> None:
    def crash() -> None:
        Journal(run).append("ending", 0, kind="killed", reason="by SIGKILL", step=5)
        write(run, attempt(1), *steps(range(4, 8), loss=1.0))
        Journal(run).append("attempt", 1, ranks=2, since=0)

    write(run, attempt(0), *steps(range(1, 6)))
    fed(run, name, lambda: None, crash)
    assert seen() == [1, 2, 3, 4, 5, 6, 7]
    assert [values["train/loss"] for _, values in Notebook.of("abc").steps] == losses
    assert Notebook.of("abc").notes == [
        "ending 5: attempt 0 ended: killed: by SIGKILL",
        "attempt 7: attempt 1 begins, on 2 ranks",
    ]


def test_of_a_run_that_is_over_the_newest_row_of_a_step_counts(run: Path) -> None:
    write(run, attempt(0), *steps(range(1, 6)), attempt(1), *steps(range(4, 8), loss=1.0))
    fed(run, "notebook")
    assert seen() == [1, 2, 3, 4, 5, 6, 7]
    assert [values["train/loss"] for _, values in Notebook.of("abc").steps] == [2.0] * 3 + [1.0] * 4


@pytest.mark.parametrize("name", ["notebook", "erasable"])
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(run: Path, name: str) -> None:
    write(run, attempt(0), *steps(range(1, 4)), {"event": "metrics", "step": 900, "accuracy": 0.5})
    Journal(run).append("alert", 0, message="loss is nan", rank=1, step=2)
    fed(run, name)
    Journal(run).append("attempt", 1, ranks=2, since=0)
    write(run, attempt(1), *steps(range(4, 6)))
    fed(run, name)
    fed(run, name)  # and again: there is nothing more to give
    assert seen() == [1, 2, 3, 900, 4, 5]
    assert Notebook.of("abc").notes == ["alert 2: rank 1: loss is nan", "attempt 5: attempt 1 begins, on 2 ranks"]


def test_a_run_that_begins_anew_is_another_run_of_the_tracker(run: Path) -> None:
    write(run, attempt(0), *steps(range(1, 6)))
    fed(run, "notebook")
    Journal(run).append("attempt", 1, ranks=2, since=1)
    write(run, attempt(1), *steps(range(1, 3), loss=1.0))
    fed(run, "notebook")
    assert (seen("abc"), seen("abc-1")) == ([1, 2, 3, 4, 5], [1, 2])
    assert Notebook.of("abc-1").configuration


def test_a_tracker_that_fails_for_a_while_gets_everything_and_one_that_goes_on_failing_says_why(run: Path) -> None:
    write(run, attempt(0), *steps(range(1, 6)))
    Notebook.failures = 2
    fed(run, "notebook", *[lambda: None] * 3)
    assert seen() == [1, 2, 3, 4, 5]
    assert read_state(run, "notebook").problem == ""
    Notebook.failures = 99
    Notebook.runs.clear()
    state_path(run, "notebook").unlink()
    fed(run, "notebook", lambda: None)
    state = read_state(run, "notebook")
    assert (seen(), state.step, state.finished) == ([1, 2], 2, False)
    assert state.problem == "ConnectionError: no route to host"


def test_without_a_loss_a_pipelines_first_rank_waits_for_that_of_the_last(run: Path) -> None:
    write(run, attempt(0), *steps(range(1, 3), loss=None))
    write(run, attempt(0), *steps(range(1, 2), loss=4.0), rank=3)
    fed(run, "notebook", lambda: None, lambda: write(run, *steps(range(2, 3), loss=3.0), rank=3))
    assert [values["train/loss"] for _, values in Notebook.of("abc").steps] == [4.0, 3.0]


def test_a_scripts_own_metrics_without_a_run_are_steps_too(tmp_path: Path) -> None:
    write(tmp_path, *({"event": "metrics", "step": step, "accuracy": step / 10} for step in (1, 5)))
    fed(tmp_path, "notebook")
    write(tmp_path, {"event": "metrics", "step": 9, "accuracy": 0.9}, {"event": "metrics", "step": 9, "recall": 0.5})
    fed(tmp_path, "notebook")
    (book,) = Notebook.runs.values()
    accuracies = [(step, {"train/accuracy": step / 10}) for step in (1, 5, 9)]
    assert book.steps == [*accuracies, (9, {"train/recall": 0.5})]


def test_metrics_before_the_first_step_are_not_lost(run: Path) -> None:
    write(run, attempt(0), {"event": "metrics", "step": 40, "accuracy": 0.1}, *steps(range(1, 3)))
    fed(run, "notebook")
    assert seen() == [40, 1, 2]


def test_an_outcome_is_handed_on_and_no_step_is_no_run(run: Path) -> None:
    fed(run, "notebook")
    assert not Notebook.runs
    write(run, attempt(0), *steps(range(1, 2)))
    Journal(run).append("end", 0, outcome="failed", exit_code=1)
    fed(run, "notebook")
    assert Notebook.of("abc").succeeded is False
    assert Notebook.of("abc").notes == ["end 1: the run ended: failed"]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tracking, "KINDS", trackers.KINDS)
    yield
    monkeypatch.undo()


def test_a_process_that_is_killed_is_one_line_and_ends_nothing(run: Path, real: None) -> None:
    with RunLock(run):
        feeds = Tracking(run, ("tensorboard",))
        feeds.start()
        process = feeds._process
        assert process is not None
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        assert not [word for word in environment if word.startswith(("RANK=", "MASTER_", "LOCAL_RANK="))]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        (line,) = feeds.remarks()
        assert line.startswith("tracking has ended by SIGKILL; training continues, and dsplan track ")
        assert feeds.remarks() == list(feeds.finish()) == []


def tensorboard_of(run: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


@pytest.fixture
def alone() -> Iterator[None]:
    """Trackers of accelerate ask who they are; the process of a test is nobody else afterwards."""
    state = pytest.importorskip("accelerate").PartialState
    state(cpu=True)
    yield
    state._reset_state()


def test_readers_of_tensorboard_see_each_step_as_it_was_run_last(run: Path, real: None, alone: None) -> None:
    def crash() -> None:
        write(run, attempt(1), *steps(range(4, 8), loss=1.0))

    write(run, attempt(0), *steps(range(1, 6)))
    Journal(run).append("alert", 0, message="<script>\x1b[31m", rank=1, step=5)
    fed(run, "tensorboard", lambda: None, crash)
    events = tensorboard_of(run)
    points = [(point.step, point.value) for point in events.Scalars("train/loss")]
    assert points == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0)]
    (text,) = events.Tensors("alert/text_summary")
    assert text.tensor_proto.string_val == [b"    rank 1: <script> [31m"]


@pytest.mark.slow
def test_a_finished_run_is_sent_by_the_command(cli: Cli, run: Path, real: None) -> None:
    write(run, attempt(0), *steps(range(1, 6)), attempt(1), *steps(range(4, 8), loss=1.0))
    printed = cli(f"track {run} --to tensorboard")
    assert printed.out == f"tensorboard: 7 steps, {run}/tensorboard\n"
    assert (printed.status, printed.err) == (0, f"dsplan: tracked by tensorboard: {run}/tensorboard\n")
    assert [point.step for point in tensorboard_of(run).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_every_tracker_has_what_the_rows_say(
    cli: Cli, run: Path, real: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow, *_ = (pytest.importorskip(name) for name in ("mlflow", "trackio", "wandb"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    losses = {step: 1 / step for step in range(1, 8)}
    for number, numbers in enumerate((range(1, 6), range(4, 8))):
        rows = [row | {"loss": losses[row["global_step"]]} for row in steps(numbers)]
        write(run, attempt(number), *rows)
    Journal(run).append("alert", 1, message="memory rises", rank=1, step=5)
    assert cli(f"track {run} --to wandb,mlflow,trackio").status == 0
    assert cli(f"track {run} --to wandb,mlflow,trackio").status == 0  # and again, which adds nothing
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = read_state(run, "mlflow").run
    history = client.get_metric_history(run_id, "train/loss")
    assert {point.step: point.value for point in history} == pytest.approx(losses)
    assert client.get_run(run_id).data.tags["alert.2"] == "step 5: rank 1: memory rises"
    assert client.get_run(run_id).data.params["run.arguments.lr"] == "0.1"
    printed = subprocess.run(
        [sys.executable, "-c", _TRACKIO], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert {int(step): loss for step, loss in json.loads(printed.stdout).items()} == pytest.approx(losses)
    assert wandb_losses(tmp_path) == pytest.approx(losses)
    assert len(history) == len(losses)


_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("train", "run-abc")
print(json.dumps({row["step"]: row["train/loss"] for row in rows}))
"""


def wandb_losses(directory: Path) -> dict[int, float]:
    """The losses in W&B's offline files, which are records of protobuf in blocks of 32 KiB, as LevelDB's logs are."""
    from wandb.proto.wandb_internal_pb2 import Record

    by_step: dict[int, float] = {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        content, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            record += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                items = Record.FromString(record).history.item
                values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
                if "train/loss" in values:
                    assert values["_step"] not in by_step
                    by_step[values["_step"]] = values["train/loss"]
                record = b""
    return by_step


def test_a_directory_that_takes_no_files_is_one_line(run: Path, real: None) -> None:
    (run / tracking.LOG_FILE).mkdir()
    feeds = Tracking(run, ("tensorboard",))
    feeds.start()
    assert feeds.remarks() == [f"{run}: nothing is tracked (Is a directory)"]
    assert feeds.remarks() == list(feeds.finish()) == []


def test_what_cannot_be_tracked_is_refused_in_one_line(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert "is no run directory" in cli.refuses("track --to tensorboard", tmp_path)
    assert "one of tensorboard, wandb, mlflow, trackio" in cli.refuses("track --to tensorbaord", run)
    assert "names no tracker" in cli.refuses("track --to ,", run)
    assert "names no tracker" in cli.refuses("run --track , train.py")


def test_a_missing_package_is_named_before_anything_starts(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(options.TRACKER_PACKAGES, "mlflow", "no_such_package")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    message = "dsplan: tracker mlflow needs the package no_such_package; pip install no_such_package\n"
    assert cli.refuses("track --to mlflow", run) == message
    assert cli.refuses("run --track mlflow --run-dir", tmp_path / "new", script) == message
    assert not (tmp_path / "new").exists()


def test_a_damaged_state_is_refused(run: Path, real: None) -> None:
    state_path(run, "wandb").write_text("{")
    with pytest.raises(BrokenFile, match="remove it to give wandb the whole run again"):
        Tracking(run, ("wandb",))


def test_names_are_such_that_every_tracker_takes_them() -> None:
    assert trackers.file_name("a'b/../<c>\x00é") == "a-b-..--c"
    assert trackers.file_name("...") == "run"
    assert len(trackers.file_name("x" * 1000)) == 64
