"""Flags of placement, supervision and trackers, over the defaults or over an earlier launch. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError, UnknownName
from hardware_db.handed_in import quote
from planner import limits
from planner.errors import ContradictoryRequest
from planner.types.plan import Configuration
from planner.types.plan_io import load_plan
from planner.types.shares import read_rates
from planner.vocabulary import FSDP_STRATEGIES
from strategies.checkpoint.object_store import location
from strategies.errors import BackendMissing, CannotRun
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.run_directory.files import PLAN_FILE, metrics_path
from strategies.run_directory.request import named
from strategies.run_directory.spec import LauncherName, Placement, SupervisionOptions
from strategies.supervision.autosave_interval import CHECKPOINT_MINUTES
from strategies.supervision.hang_detection import HANG_SECONDS
from strategies.telemetry.metrics import read_metrics, relative_rates

DEFAULT_SUPERVISION = SupervisionOptions(
    checkpoint_minutes=CHECKPOINT_MINUTES, hang_seconds=HANG_SECONDS, grace_seconds=GRACE_SECONDS
)

# Ray's own variable, which `ray job submit` sets, and its word for a Ray of this machine alone.
_RAY_ADDRESS, _OWN_RAY = "RAY_ADDRESS", "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedPlacement:
    """The flags of `Placement`; None is left open."""

    launcher: LauncherName | None = None
    nodes: str | None = None
    """As it was written: K, or MIN:MAX."""
    rendezvous: str | None = None
    hostfile: Path | None = None
    node_rank: int | None = None
    ray_address: str | None = None
    launcher_option: Sequence[str] | None = None

    def over(self, earlier: Placement) -> Placement:
        """Return the placement with what is left open from an earlier one, unless that had another launcher.

        Raises:
            DsplanError: `nodes` is no number of nodes, `rendezvous` no address, or `hostfile` no file.
        """
        if self.hostfile is not None and not self.hostfile.is_file():
            raise DsplanError(f"--hostfile {self.hostfile}: no such file; write one line per node into it")
        changes: dict[str, Any] = named(self)
        if options := changes.pop("launcher_option", None):
            changes["options"] = tuple(options)
        if self.rendezvous is not None:
            _require_address(self.rendezvous)
        if self.hostfile is not None:
            changes["hostfile"] = str(self.hostfile.resolve())
        if changes.pop("nodes", None) is not None:
            changes["least_nodes"], changes["most_nodes"] = _nodes(self.nodes or "")
        if (self.launcher or earlier.launcher) == "ray":
            address = self.ray_address or earlier.ray_address or os.environ.get(_RAY_ADDRESS)
            changes["ray_address"] = None if address in ("", _OWN_RAY) else address
        # Another launcher would not know the options of the earlier one.
        return replace(earlier if self.launcher in (None, earlier.launcher) else Placement(), **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSupervision:
    """The flags of `SupervisionOptions`; None is left open."""

    retries: int | None = None
    checkpoint_dir: Path | None = None
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = None
    """0: not by the clock."""
    mttf_hours: float | None = None
    hang_minutes: float | None = None
    grace_seconds: float | None = None
    tune: bool = False

    def over(self, earlier: SupervisionOptions) -> SupervisionOptions:
        """Return the options with what is left open from earlier ones.

        Raises:
            ContradictoryRequest: a time, or a number, is none.
        """
        limits.RETRIES.check("--retries", self.retries)
        limits.STEPS.check("--checkpoint-steps", self.checkpoint_steps)
        limits.MINUTES.check("--checkpoint-minutes", self.checkpoint_minutes)
        limits.MTTF_HOURS.check("--mttf-hours", self.mttf_hours)
        limits.MINUTES.check("--hang-minutes", self.hang_minutes)
        limits.GRACE_SECONDS.check("--grace-seconds", self.grace_seconds)
        changes: dict[str, Any] = named(self)
        changes["tunes"] = changes.pop("tune") or earlier.tunes
        if self.checkpoint_dir is not None:
            changes["checkpoint_directory"] = str(location(changes.pop("checkpoint_dir")).resolve())
        if self.hang_minutes is not None:
            changes["hang_seconds"] = 60 * changes.pop("hang_minutes")
        # Who says after how many steps has said when; the clock then saves only if asked to as well.
        if self.checkpoint_minutes == 0 or (self.checkpoint_minutes is None and self.checkpoint_steps is not None):
            changes["checkpoint_minutes"] = None
        return replace(earlier, **changes)


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names of accelerate's `LoggerType`."""
TRACKER_PACKAGES: dict[str, str] = {name: name for name in TRACKERS}
"""The package that each tracker is installed by."""


def parse_trackers(text: str) -> tuple[str, ...]:
    """Return the names in `tensorboard,wandb`, each once.

    Raises:
        CannotRun: there is none.
        UnknownName: a tracker that is none of `TRACKERS`.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise CannotRun(
            f"{quote(text)} names no tracker; give one or more of {', '.join(TRACKERS)}, with commas between"
        )
    for name in names:
        if name not in TRACKER_PACKAGES:
            raise UnknownName("tracker", name, TRACKERS, hint=f"one of {', '.join(TRACKERS)}")
    return names


def check_trackers(names: Sequence[str]) -> None:
    """Require what the trackers are made of.

    Raises:
        BackendMissing: the package of a tracker, or accelerate, is not installed.
    """
    for name in names:
        for package in ("accelerate", TRACKER_PACKAGES[name]):
            if find_spec(package) is None:
                raise BackendMissing(f"tracker {name} needs the package {package}; pip install {package}")


def parse_kernels(text: str | None) -> dict[str, str]:
    """Return the providers by kernel that `--kernels` names, `all` for one that is meant for every kernel.

    Raises:
        ContradictoryRequest: a kernel has no provider, or two.
    """
    providers: dict[str, str] = {}
    for part in (text or "").split(","):
        name, is_pair, provider = (word.strip() for word in part.partition("="))
        name, provider = (name, provider) if is_pair else ("all", name)
        if text is not None and (not name or not provider or name in providers):
            raise ContradictoryRequest(f"--kernels {text!r} is read as NAME, or as KERNEL=NAME,KERNEL=NAME; each once")
        if provider:
            providers[name] = provider
    return providers


def parse_rates(text: str) -> str:
    """Return how fast ranks are beside each other (`3x1,1x0.5`): as it is written, or as a run measured it.

    Raises:
        ContradictoryRequest: it is neither.
        DsplanError: the run does not say.
    """
    directory = Path(text)
    if not text or not directory.is_dir():
        read_rates(text)
        return text
    plan_file = directory / PLAN_FILE
    if plan_file.exists() and (why := _why_no_rates(load_plan(plan_file).configuration)):
        raise DsplanError(f"--rates {text}: {why}; measure a run of ddp, zero1 or zero2, or write the rates")
    ranks = len(list(directory.glob(metrics_path(directory, 0).name.replace("0", "*"))))
    rates = relative_rates(read_metrics(directory, ranks))
    if rates is None:
        raise DsplanError(f"--rates {text}: holds no steps of several ranks after warm-up; name the directory of a run")
    return rates


def _why_no_rates(chosen: Configuration) -> str | None:
    """Return why a run's forward passes do not say how fast its ranks are; None where they do."""
    if chosen.strategy in _WAITING:
        return f"under {chosen.strategy} ranks wait for each other in every layer, so that all seem as fast"
    if chosen.pp > 1:
        return f"with pp {chosen.pp} ranks have unlike parts of the model, and wait for each other"
    return None


_WAITING = (*FSDP_STRATEGIES, "zero3")
_MOST_PROFILED = 100
"""Steps of one profile; a trace of a step takes megabytes."""
_SPAN = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")


def parse_profile(text: str) -> str:
    """Return the steps that `--profile` names, one or the first and the last of several, as FIRST:LAST.

    Raises:
        DsplanError: they are no such steps.
    """
    first, last = _span(text)
    if not 1 <= first <= last < first + _MOST_PROFILED:
        example = "write 20, or 20:22 for three of them"
        raise DsplanError(f"--profile {quote(text)} names no steps, at most {_MOST_PROFILED}, from 1 on; {example}")
    return f"{first}:{last}"


def _nodes(text: str) -> tuple[int, int]:
    least, most = _span(text)
    if not 1 <= least <= most <= limits.NODE_RANK.most:
        raise DsplanError(f"--nodes {quote(text)} is no number of nodes; write 4, or 2:4 for at least 2 and at most 4")
    return least, most


def _span(text: str) -> tuple[int, int]:
    """Return both numbers of `A:B`, twice that of `A`, and zeros of anything else."""
    match = _SPAN.fullmatch(text.strip())
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def _require_address(text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise DsplanError(f"--rendezvous {quote(text)} is no address; write HOST:PORT, such as node0:29400")
