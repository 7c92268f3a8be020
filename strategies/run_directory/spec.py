"""LaunchSpec: everything the launched processes need to know, handed to them as one file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from planner.errors import NothingFits
from strategies.run_directory.files import SPEC_FILE, read_json, write_json

Value = TypeVar("Value")

# Kinds of endings of a rank or an attempt, the same for ranks, supervisor, journal and report.


EndingKind = Literal[
    "regrouped",  # nodes came or went: saved, and all start again together
    "preempted",  # SIGTERM or SIGUSR1: saved, and stopped on purpose
    "switch",  # saved, and stopped on purpose to resume under a better plan
    "out_of_memory",  # of a GPU, of the host, or of the cgroup
    "not_finite",  # losses or gradients that stay NaN or infinite
    "disk_full",  # a checkpoint or a log could not be written
    "hung",  # no progress for `SupervisionOptions.hang_seconds`
    "failed",  # the script raised, or ended with a status of its own
    "killed",  # a signal from outside
    "refused",  # what was asked for cannot be run: an expected failure that no repetition mends
    "lost",  # the node or the connection to it is gone
]
ENDING_KINDS: tuple[EndingKind, ...] = get_args(EndingKind)
"""In the order in which a rank's word counts where several ended at once: causes before the effects they have on other
ranks."""
STOPS: tuple[EndingKind, ...] = ("preempted", "switch", "regrouped")
"""Endings on purpose: the ranks saved before them."""

STOPPED = 75
"""Exit status of a rank that saved and stopped on purpose, and of `dsplan run` when it was preempted: EX_TEMPFAIL of
sysexits.h, "try again later". `rank{N}.failure.json` has the kind."""


def exit_status_of(kind: EndingKind, error_type: str) -> int:
    """Return the exit status of a rank or a run that ended so: 2 cannot be run, 1 failed or no plan fits."""
    if kind in ("preempted", "switch"):
        return STOPPED
    return 2 if kind == "refused" and error_type != NothingFits.__name__ else 1


# Where a run's ranks start, and what is done when they end.


ScriptKind = Literal["dsplan", "huggingface", "deepspeed", "accelerate", "lightning", "torch", "plain"]
"""Who trains: `torch` is a script that wraps its model in DDP or FSDP itself; in a `plain` one nobody is seen to,
though steps are done."""
SAVING: tuple[ScriptKind, ...] = ("dsplan", "huggingface", "lightning")
"""Scripts whose ranks save and stop when they are asked to; others are ended, and may answer SIGTERM themselves."""
LauncherName = Literal["local", "slurm", "mpi", "ray", "deepspeed", "accelerate"]
LAUNCHER_NAMES: tuple[LauncherName, ...] = get_args(LauncherName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Launcher of the ranks and number of nodes.

    Between `least_nodes` and `most_nodes` take part; they differ only where nodes may come and go. `rendezvous` is the
    HOST:PORT where the nodes of a local launch meet, `hostfile` DeepSpeed's or Open MPI's, `node_rank` this node's
    number for DeepSpeed without ssh and for accelerate, `ray_address` that of a Ray cluster (None: this machine's own),
    and `options` go to the launcher's command line as they are.
    """

    launcher: LauncherName = "local"
    least_nodes: int = 1
    most_nodes: int = 1
    rendezvous: str | None = None
    hostfile: str | None = None
    node_rank: int | None = None
    ray_address: str | None = None
    options: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may change while the run continues."""
        return self.least_nodes != self.most_nodes

    @property
    def is_judged_there(self) -> bool:
        """True if a cluster chooses the nodes, of which this machine says nothing."""
        return self.launcher == "slurm" or self.ray_address is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionOptions:
    """The watch over a run; defaults come from the modules that use them, by `strategies/launch/options.py`."""

    retries: int | None = None
    """Attempts in a row that may end without progress; None leaves it to `strategies/launch/policy.py`."""
    checkpoint_directory: str = ""
    """Where ranks save by themselves; empty: in the run directory."""
    checkpoint_minutes: float | None
    """How often they do; None: not by the clock."""
    checkpoint_steps: int | None = None
    """The same in optimizer steps; None: not by steps."""
    mttf_hours: float | None = None
    """Mean hours between failures of the job, for which ranks save as often as is best; None: not by that."""
    hang_seconds: float
    """Time without progress that ends an attempt; 0: none does."""
    grace_seconds: float
    """Time that a stop may take that was asked for."""
    tunes: bool = False
    """Whether first steps are measured to find a better plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptStart:
    """Arguments and variables that the command of another launcher would have handed to a script."""

    module: str = ""
    """The name under which `python -m` runs it; empty: it is run as a file."""
    local_rank: str = ""
    """The flag that names the rank on its node behind the arguments; empty: the script has none."""
    by_accelerate: bool = False
    """Whether `accelerate launch` would have set its variables."""
    accelerate: tuple[str, ...] = ()
    """The flags that it would have had."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the command sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One launch on this node: the script with its arguments, its processes, and where they write.

    `processes` counts the ranks of one node; `environment` is added to the processes' own. `run_id` tells this run's
    checkpoints from those of others. `trackers` are names of `strategies/launch/options.py`. What the script trains
    with is seen in its ranks (strategies/run_directory/claim).
    """

    script: str
    arguments: tuple[str, ...] = ()
    processes: int
    run_directory: str
    environment: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    supervision: SupervisionOptions
    run_id: str = ""
    trackers: tuple[str, ...] = ()
    start: ScriptStart = field(default_factory=ScriptStart)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run_directory)

    @property
    def path(self) -> Path:
        """The file that `save` writes, which every rank gets as its argument."""
        return self.directory / SPEC_FILE

    def save(self) -> None:
        """Write the spec into its run directory."""
        write_json(self.path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> LaunchSpec:
        """Read the spec that `save` wrote.

        Raises:
            BrokenFile: it is that of another version, or damaged.
        """
        return read_json(cls, path)
