"""Placement and Supervision: where a run's ranks start, and what is done when they end. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ScriptKind = Literal["dsplan", "huggingface", "deepspeed", "accelerate", "plain"]
SAVING: tuple[ScriptKind, ...] = ("dsplan", "huggingface")
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
        """Whether the number of nodes may change while the run goes on."""
        return self.least_nodes != self.most_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """How a run is watched over.

    `retries` attempts in a row may end without progress. Ranks save to `checkpoint_directory` (empty: in the run
    directory) every `checkpoint_minutes` and every `checkpoint_steps`; None: that one does not count. `hang_seconds`
    without progress end an attempt; 0: never. A stop that was asked for may take `grace_seconds`.
    """

    retries: int = RETRIES
    checkpoint_directory: str = ""
    checkpoint_minutes: float | None = 10.0
    checkpoint_steps: int | None = None
    hang_seconds: float = 900.0
    grace_seconds: float = GRACE_SECONDS
    tunes: bool = False
