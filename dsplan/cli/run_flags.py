"""The flags of `dsplan run`: the plan, where ranks start, and how the run is watched over.

None stands for a flag that was not given, so that a resumed run keeps what it was started with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import number
from planner import limits
from strategies.launch.settings import LauncherName


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningFlags:
    """What runs."""

    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Run this plan instead of making one.")] = None
    nproc: Annotated[
        int | None, number(limits.PROCESSES, "Processes per node; by default one per GPU, two without a GPU.")
    ] = None
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plan within this strategy only, such as fsdp or zero2.")
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where logs and metrics go; by default a new one per run.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementFlags:
    """Who starts the ranks, and on which nodes."""

    launcher: Annotated[
        LauncherName | None, typer.Option(help="Who starts the ranks; local by default, on this machine.")
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="K|MIN:MAX", help="Nodes, each with --nproc processes; with MIN:MAX they may come and go."
        ),
    ] = None
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the nodes of a local launch meet; run the command on each."),
    ] = None
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The nodes, for the deepspeed and mpi launchers.")
    ] = None
    node_rank: Annotated[
        int | None,
        number(limits.NODE_RANK, "This node's number, for deepspeed without ssh and for accelerate.", "K"),
    ] = None
    launcher_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Handed to srun, mpirun, deepspeed or accelerate as it is; may be repeated."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionFlags:
    """What survives, and how a run is stopped and gone on with."""

    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run in this run directory; SCRIPT may be left out."),
    ] = None
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT|start",
            help="With --resume: go on from this checkpoint instead of the newest, or begin anew.",
        ),
    ] = None
    retries: Annotated[
        int | None,
        number(limits.RETRIES, "Restarts in a row without progress; 3, or 0 where nothing can be resumed."),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where ranks save by themselves; in the run directory by default."),
    ] = None
    checkpoint_steps: Annotated[int | None, number(limits.STEPS, "Save after every so many steps.", "K")] = None
    checkpoint_minutes: Annotated[
        float | None,
        number(limits.MINUTES, "Save every so many minutes; 10, or 0 for not by the clock.", "M"),
    ] = None
    hang_minutes: Annotated[
        float | None,
        number(limits.MINUTES, "Restart after so long without progress; 15, or 0 for never.", "M"),
    ] = None
    grace_seconds: Annotated[
        float | None,
        number(limits.GRACE_SECONDS, "Time to save after SIGTERM or SIGUSR1; 30 by default.", "S"),
    ] = None
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the first steps and switch to a better plan where one is found.")
    ] = False
