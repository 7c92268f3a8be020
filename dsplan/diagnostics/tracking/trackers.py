"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and trackio, each behind accelerate's tracker of its name.

Importing this module brings neither accelerate nor torch.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from hardware_db.records import dataclass
from strategies.launch.secret_values import is_secret
from strategies.telemetry.metrics import group


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """Names of a run in a tracker."""

    directory: Path
    """The run directory."""
    project: str
    """What the run is filed under: the script's name where the tracker's own environment variable names nothing."""
    name: str
    identity: str
    """Letters and digits that no other run has."""
    known: str = ""
    """What the tracker itself called the run, where it has it already."""
    resumes_at: int = 1
    """The first step that it has not got."""


class Tracker(ABC):
    """One tracker with one run open. Whatever its library raises comes through."""

    takes_back: ClassVar[bool] = False
    """True if steps that were logged can be replaced by others."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.tracker: Any = self.open()

    @abstractmethod
    def open(self) -> Any:
        """Start the tracker of accelerate."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The address at which a person finds the run."""

    @property
    def own_name(self) -> str:
        """The tracker's own name of the run, to hand in as `TrackedRun.known` next time."""
        return ""

    @property
    def last_step(self) -> int | None:
        """The last step that it has by its own account, None where it cannot say."""
        return None

    def configure(self, values: Mapping[str, Any]) -> None:
        """Store what the run was asked to do, as names with numbers, texts and truth values."""
        self.tracker.store_init_configuration(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Store figures of a step; those of one step may come in several calls."""
        self.tracker.log(dict(values), step=step)

    def take_back(self, step: int) -> None:
        """Forget `step` and all after it; only where `takes_back`."""
        raise NotImplementedError

    @abstractmethod
    def say(self, title: str, text: str, step: int, number: int) -> None:
        """Store something that happened, the `number`th of the run."""

    def finish(self, *, succeeded: bool) -> None:
        """Hand over what is still held back, and close the run."""
        self.tracker.finish()


def _start(kind: str, /, *arguments: Any, **named: Any) -> Any:
    tracker = getattr(import_module("accelerate.tracking"), kind)(*arguments, **named)
    tracker.start()
    return tracker


class _TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run directory. Steps that are taken back are purged by readers."""

    takes_back = True

    def open(self) -> Any:
        purge = {} if self.run.resumes_at <= 1 else {"purge_step": self.run.resumes_at}
        return _start("TensorBoardTracker", "tensorboard", self.run.directory, **purge)

    @property
    def where(self) -> str:
        return str(self.run.directory / "tensorboard")

    def take_back(self, step: int) -> None:
        self.tracker.finish()
        self.tracker = _start("TensorBoardTracker", "tensorboard", self.run.directory, purge_step=step)

    def say(self, title: str, text: str, step: int, number: int) -> None:
        # Indented, Markdown shows a text as it is.
        self.tracker.writer.add_text(title, f"    {text}", global_step=step)
        self.tracker.writer.flush()


class _Wandb(Tracker):
    """A run of Weights & Biases, which resumes under the identity it has; offline with WANDB_MODE=offline."""

    def open(self) -> Any:
        self._newest, run = 0, self.run
        project = os.environ.get("WANDB_PROJECT", run.project)
        return _start("WandBTracker", project, id=run.identity, name=run.name, resume="allow")

    @property
    def where(self) -> str:
        run = self.tracker.run
        return str(getattr(run, "url", None) or f"{Path(run.dir).parent}, until `wandb sync` sends it")

    def log(self, values: Mapping[str, float], step: int) -> None:
        # Figures of a step before the newest one are refused.
        self._newest = max(self._newest, step)
        super().log(values, self._newest)

    def say(self, title: str, text: str, step: int, number: int) -> None:
        self.tracker.run.alert(title=title, text=f"step {step}: {text}", level="WARN")

    def finish(self, *, succeeded: bool) -> None:
        self.tracker.run.finish(exit_code=0 if succeeded else 1)


class _Mlflow(Tracker):
    """A run of MLflow, at MLFLOW_TRACKING_URI or where MLflow keeps runs by default. Happenings are tags."""

    def open(self) -> Any:
        run = self.run
        tracker = _start("MLflowTracker", experiment_name=run.project, run_id=run.known or None, run_name=run.name)
        self._library = import_module("mlflow")
        return tracker

    @property
    def where(self) -> str:
        return f"{self._library.get_tracking_uri()}, run {self.own_name}"

    @property
    def own_name(self) -> str:
        return str(self.tracker.tracker.info.run_id)

    @property
    def last_step(self) -> int | None:
        if not self.run.known:
            return None
        history = self._library.MlflowClient().get_metric_history(self.own_name, group("seconds"))
        return max((int(point.step) for point in history), default=0)

    def say(self, title: str, text: str, step: int, number: int) -> None:
        self._library.set_tag(f"{title}.{number}", f"step {step}: {text}")

    def finish(self, *, succeeded: bool) -> None:
        self._library.end_run("FINISHED" if succeeded else "FAILED")


class _Trackio(Tracker):
    """A run of trackio, in TRACKIO_DIR or on the Space of TRACKIO_SPACE_ID."""

    def open(self) -> Any:
        run, library = self.run, import_module("trackio")
        # It tells runs by name alone, and a directory's name may come twice.
        options: dict[str, Any] = {"name": f"{run.name}-{run.identity[:6]}", "resume": "allow"}
        # It would look at the process that feeds it, not at the ranks.
        takes = inspect.signature(library.init).parameters
        options |= {name: False for name in ("auto_log_cpu", "auto_log_gpu") if name in takes}
        tracker = _start("TrackioTracker", os.environ.get("TRACKIO_PROJECT", run.project), **options)
        self._library = library
        following = getattr(tracker.run, "_next_step", None)
        self._last = following - 1 if isinstance(following, int) else None
        return tracker

    @property
    def where(self) -> str:
        space = os.environ.get("TRACKIO_SPACE_ID")
        return f"Space {space}" if space else str(getattr(self._library, "TRACKIO_DIR", "trackio's folder"))

    @property
    def last_step(self) -> int | None:
        return self._last

    def say(self, title: str, text: str, step: int, number: int) -> None:
        self._library.alert(title=title, text=f"step {step}: {text}")


KINDS: dict[str, type[Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def figures(row: Mapping[str, Any], *, heading: str = "") -> dict[str, float]:
    """Return the numbers in a row of metrics, by the names that trackers get; with `heading` all are below it."""
    return {
        f"{heading}/{name}" if heading else group(name): value
        for name, value in row.items()
        if name not in ("step", "global_step", "time")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


_MOST_LETTERS = 500
"""MLflow refuses longer values."""


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, bool | int | float | str]:
    """Return a tree of values as names with dots, for trackers' tables; texts are cleaned."""
    names: dict[str, bool | int | float | str] = {}
    for key, value in values.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            names |= flatten(value, name)
        elif isinstance(value, (bool, int, float)):
            names[name] = value
        elif value is not None:
            names[name] = clean(str(value))
    return names


def clean(text: str) -> str:
    """Return a text as trackers take it: short, with nothing that a terminal or a page would obey."""
    kept = "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_LETTERS])
    return kept.encode("utf-8", "replace").decode()


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return a script's flags with their values, `true` for those without; what may be a secret is left out."""
    flags: dict[str, str] = {}
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if not word.startswith("--") or word == "--":
            continue
        name, is_pair, value = word[2:].partition("=")
        name = file_name(name.replace("-", "_"))
        if not is_secret(name):
            flags[name] = clean(value if is_pair else "true" if following.startswith("--") else following)
    return flags


def file_name(text: str) -> str:
    """Return a name that every tracker takes: letters, digits, dots, dashes and underscores."""
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return kept[:64].strip(".-") or "run"
