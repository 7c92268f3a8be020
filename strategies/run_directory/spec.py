"""LaunchSpec: everything the launched processes need to know, handed to them as one file."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_whole
from hardware_db.from_json import WrongValue, from_json
from planner.errors import NothingFits

Value = TypeVar("Value")

# Kinds of endings of a rank or an attempt, the same for ranks, supervisor, journal and report.


EndingKind = Literal[
    "failed",  # the script raised, or ended with a status of its own
    "refused",  # what was asked for cannot be run: an expected failure that no repetition mends
    "out_of_memory",  # of a GPU, of the host, or of the cgroup
    "killed",  # a signal from outside
    "hung",  # no progress for `AttemptOptions.hang_seconds`
    "not_finite",  # losses or gradients that stay NaN or infinite
    "disk_full",  # a checkpoint or a log could not be written
    "lost",  # the node or the connection to it is gone
    "preempted",  # SIGTERM or SIGUSR1: saved, and stopped on purpose
    "switch",  # saved, and stopped on purpose to resume under a better plan
    "regrouped",  # nodes came or went: saved, and all start again together
]
ENDING_KINDS: tuple[EndingKind, ...] = get_args(EndingKind)
STOPS: tuple[EndingKind, ...] = ("preempted", "switch", "regrouped")
"""Endings on purpose: the ranks saved before them."""

STOPPED = 75
"""Exit status of a rank that saved and stopped on purpose, and of `dsplan run` when it was preempted: EX_TEMPFAIL of
sysexits.h, "try again later". `rank{N}.failure.json` has the kind."""


def exit_status_of(kind: EndingKind, error_type: str) -> int:
    """The exit status of a rank or a run that ended so: 2 cannot be run, 1 failed or no plan fits."""
    if kind in ("preempted", "switch"):
        return STOPPED
    return 2 if kind == "refused" and error_type != NothingFits.__name__ else 1


# Where a run's ranks start, and what is done when they end.


ScriptKind = Literal["dsplan", "huggingface", "deepspeed", "accelerate", "lightning", "torch", "plain"]
"""Who trains: `torch` is a script that wraps its model in DDP or FSDP itself; in a `plain` one nobody is seen to,
though steps are done."""
SAVING: tuple[ScriptKind, ...] = ("dsplan", "huggingface", "lightning")
"""Scripts whose ranks save and stop when they are asked to; others are ended, and may answer SIGTERM themselves."""
LauncherName = Literal["local", "slurm", "mpi", "deepspeed", "accelerate"]
LAUNCHER_NAMES: tuple[LauncherName, ...] = get_args(LauncherName)

RETRIES = 3
"""Attempts in a row without progress before a run is given up."""
GRACE_SECONDS = 30.0
"""What SLURM's KillWait, Kubernetes' terminationGracePeriodSeconds and most spot markets leave at the least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Who starts the ranks and on how many nodes.

    Between `least_nodes` and `most_nodes` take part; they differ only where nodes may come and go. `rendezvous` is the
    HOST:PORT where the nodes of a local launch meet, `hostfile` DeepSpeed's or Open MPI's, `node_rank` this node's
    number for DeepSpeed without ssh and for accelerate, and `options` go to the launcher's command line as they are.
    """

    launcher: LauncherName = "local"
    least_nodes: int = 1
    most_nodes: int = 1
    rendezvous: str | None = None
    hostfile: str | None = None
    node_rank: int | None = None
    options: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change while the run continues."""
        return self.least_nodes != self.most_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """How a run is watched over.

    `retries` attempts in a row may end without progress; None: `RETRIES`, or none where nothing can be resumed. Ranks
    save to `checkpoint_directory` (empty: in the run directory) every `checkpoint_minutes` and every
    `checkpoint_steps`; None: that one does not count. `hang_seconds` without progress end an attempt; 0: never. A stop
    that was asked for may take `grace_seconds`.
    """

    retries: int | None = None
    checkpoint_directory: str = ""
    checkpoint_minutes: float | None = 10.0
    checkpoint_steps: int | None = None
    hang_seconds: float = 900.0
    grace_seconds: float = GRACE_SECONDS
    tunes: bool = False


SPEC_FILE = "launch.json"
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One launch on this node: the script with its arguments, its processes, and where they write.

    `processes` counts the ranks of one node; `environment` is added to the processes' own. `run_id` tells this run's
    checkpoints from those of others. `trackers` are names of `strategies/telemetry/trackers.py`. What the script trains
    with is seen in its ranks (strategies/run_directory/claim).
    """

    script: str
    arguments: tuple[str, ...] = ()
    processes: int
    run_directory: str
    environment: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    supervision: Supervision = field(default_factory=Supervision)
    run_id: str = ""
    trackers: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        return Path(self.run_directory)

    @property
    def path(self) -> Path:
        """Where `save` writes: what every rank gets as its argument."""
        return self.directory / SPEC_FILE

    def save(self) -> None:
        """Write the spec into its run directory."""
        write_json(self.path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> LaunchSpec:
        """The spec that `save` wrote.

        Raises:
            BrokenFile: it is that of another version, or damaged.
        """
        return read_json(cls, path)


def log_path(directory: Path, rank: int, stream: str) -> Path:
    """Where rank `rank`'s `stdout` or `stderr` goes."""
    return directory / f"rank{rank}.{stream}.log"


def failure_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says why it failed."""
    return directory / f"rank{rank}.failure.json"


def success_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says that it has ended with status 0, and at which step."""
    return directory / f"rank{rank}.success.json"


def pid_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` leaves its process id, once it takes signals."""
    return directory / f"rank{rank}.pid"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` says every few seconds how far it is."""
    return directory / f"rank{rank}.heartbeat"


def stacks_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` writes the stacks of its threads when it hangs."""
    return directory / f"rank{rank}.stacks.txt"


def profile_paths(directory: Path, rank: int) -> tuple[Path, Path]:
    """Where rank `rank` leaves the Chrome trace and the memory snapshot of steps that were profiled."""
    return directory / f"profile-rank{rank}.trace.json", directory / f"profile-rank{rank}.memory.pickle"


def profiles_in(directory: Path) -> dict[str, tuple[Path, ...]]:
    """Profiles in a run directory by what opens them."""
    found = {
        "ui.perfetto.dev or chrome://tracing": tuple(sorted(directory.glob("profile-rank*.trace.json"))),
        "pytorch.org/memory_viz": tuple(sorted(directory.glob("profile-rank*.memory.pickle"))),
    }
    return {viewer: paths for viewer, paths in found.items() if paths}


def keep_result(directory: Path, result: object) -> None:
    """Write how the ranks ended. A disk that is full by then changes nothing about it, and they have said it too."""
    with suppress(OSError):
        write_json(directory / RESULT_FILE, result)


def read_json(kind: type[Value], path: Path) -> Value:
    """The dataclass that `write_json` wrote.

    Raises:
        BrokenFile: it is that of another version, or damaged.
    """
    try:
        return from_json(kind, json.loads(path.read_text()))
    except (ValueError, RecursionError, WrongValue) as error:
        problem = f"not a run of this version of dsplan ({' '.join(str(error).split())})"
        raise BrokenFile(path, problem, "start a new one") from None


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, whole or not at all."""
    replace_whole(path, json.dumps(value, indent=1))
