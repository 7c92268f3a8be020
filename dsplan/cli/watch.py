"""`dsplan watch` and `dsplan track`: runs while they go, or when they are over, from another terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from dsplan.cli.flags import JsonFlag, among, number
from dsplan.cli.kubernetes import Context, Namespace
from planner import limits


def watch(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The directory of a run of `dsplan run`, or the name of its job."),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(
            "--runs",
            metavar="DIR|postgresql://HOST",
            help="List all runs below this directory instead, or those of a team's database, and their cost so far.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        number(
            limits.USD_PER_HOUR, "With --runs: what one GPU costs per hour, by default its node type's price.", "USD"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        number(limits.STEPS, "Steps it shall have, where the script was not told by --steps or --max-steps."),
    ] = None,
    every: Annotated[float, number(limits.ANSWER_SECONDS, "Seconds between two looks.", metavar="S")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    launcher: Annotated[
        Literal["kubernetes", "skypilot"] | None,
        typer.Option(help="Of a run on a cluster or a cloud: show its job, what happens to it, and its log."),
    ] = None,
    kube_namespace: Namespace = None,
    kube_context: Context = None,
    json: JsonFlag = False,
) -> None:
    """Ranks, loss, speed, memory, GPU use and alerts of a run that goes on; with --runs, a line for each of many runs.

    A run's page ends with the run. Files alone are read, of a run on a cluster what the cluster says, and of a team's
    database what runs have reported to it.
    """
    if launcher != "kubernetes" and (kube_namespace is not None or kube_context is not None):
        from planner.errors import ContradictoryRequest

        raise ContradictoryRequest("--kube-namespace and --kube-context are for --launcher kubernetes; name that")
    if launcher is not None:
        _watch_job(launcher, directory, runs, kube_namespace, kube_context, once=once, json=json)
    if runs is not None:
        _check_many(directory, steps)
        _watch_many(runs, price, every, once=once, json=json)
        return
    from planner.errors import ContradictoryRequest

    if directory is None:
        raise ContradictoryRequest("no run is named; give a run directory, or --runs with what tells of many")
    if price is not None:
        raise ContradictoryRequest("--price is for the cost of many runs; add --runs DIR or leave it out")
    _watch_one(directory, steps, every, once=once, json=json)


def _watch_job(
    launcher: str,
    name: Path | None,
    runs: str | None,
    namespace: str | None,
    context: str | None,
    *,
    once: bool,
    json: bool,
) -> NoReturn:
    from dsplan.cli.kubernetes import watch_on_cluster
    from dsplan.cli.skypilot import watch_on_cloud
    from planner.errors import ContradictoryRequest

    if name is None or runs is not None:
        raise ContradictoryRequest("of jobs one is watched; give the name that dsplan run printed alone")
    if launcher == "skypilot":
        raise typer.Exit(watch_on_cloud(str(name), once=once, json=json))
    raise typer.Exit(watch_on_cluster(str(name), namespace, context, once=once, json=json))


def _check_many(directory: Path | None, steps: int | None) -> None:
    from planner.errors import ContradictoryRequest

    if directory is not None:
        raise ContradictoryRequest(f"{directory} is one run and --runs names many; leave one out")
    if steps is not None:
        raise ContradictoryRequest("--steps says how many steps one run shall have; leave it or --runs out")


def _watch_many(where: str, price: float | None, every: float, *, once: bool, json: bool) -> None:
    from dsplan.render.runs_view import runs_blocks, runs_to_dict
    from dsplan.render.show import can_redraw, show, show_json
    from strategies.launch.reported_runs import runs_at

    runs = runs_at(where)
    if json:
        show_json(runs_to_dict(runs.look(), price))
    elif once or not can_redraw(sys.stdout):
        show(runs_blocks(runs.look(), price))
    else:
        from dsplan.render.live_frames import follow_runs

        follow_runs(runs.look, every, price)


def _watch_one(directory: Path, steps: int | None, every: float, *, once: bool, json: bool) -> None:
    from dsplan.render.show import can_redraw, room, show, show_json
    from dsplan.render.watch_view import RunWatch, frame_blocks, frame_of, frame_to_dict

    if json:
        show_json(frame_to_dict(frame_of(directory, steps)))
    elif once or not can_redraw(sys.stdout):
        width, unicode = room()
        show(frame_blocks(frame_of(directory, steps), width, unicode=unicode))
    else:
        from dsplan.render.live_frames import follow

        follow(RunWatch(directory, steps).look, every)


def track(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory of `dsplan run`.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME,...",
            help="One or more of tensorboard, wandb, mlflow, trackio.",
            autocompletion=among("strategies.launch.options:TRACKERS"),
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Send a run to experiment trackers: all that they have not got, and of a run that goes on what follows."""
    from dataclasses import asdict

    from dsplan.diagnostics.tracking.feed import Tracking, read_state
    from dsplan.render.show import say, show_json
    from dsplan.report.run_data import is_run_directory
    from hardware_db.errors import BrokenFile
    from hardware_db.notices import notice
    from strategies.launch.options import check_trackers, parse_trackers

    names = parse_trackers(to)
    check_trackers(names)
    if not is_run_directory(directory):
        raise BrokenFile(directory, "is no run directory", "name a run directory of dsplan run")
    directory = directory.resolve()
    tracking = Tracking(directory, names)
    tracking.start()
    try:
        for line in tracking.follow():
            notice(line)
    finally:
        tracking.close()
    states = {name: read_state(directory, name) for name in names}
    if json:
        show_json({"schema_version": 1, "run": directory.name, "trackers": {n: asdict(s) for n, s in states.items()}})
    else:
        for name, state in states.items():
            say(f"{name}: {state.step} steps, {state.where}" if state.where else f"{name}: nothing")
    raise typer.Exit(0 if all(state.finished for state in states.values()) else 1)
