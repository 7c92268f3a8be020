"""`dsplan run` and `dsplan watch` of a run on a cloud, as a managed job of SkyPilot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardware_db.notices import notice
from hardware_db.records import dataclass

if TYPE_CHECKING:
    from strategies.launch.options import RequestedPlacement
    from strategies.launch.report import Outcome
    from strategies.launch.skypilot.request import RequestedTask
    from strategies.launch.skypilot.service import Record, SkyPilot


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotFlags:
    """The managed job of `--launcher skypilot`."""

    sky_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the job and its checkpoints; by default the script's and the time."),
    ] = None
    sky_task: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Your part of SkyPilot's task: setup, workdir, file_mounts, secrets, resources."
        ),
    ] = None
    sky_spot: Annotated[
        bool, typer.Option("--sky-spot", help="On spot nodes, which cost less and may be taken away.")
    ] = False


def requested_task(flags: SkyPilotFlags) -> RequestedTask:
    """Return the flags as what the launcher takes."""
    from strategies.launch.skypilot.request import RequestedTask

    return RequestedTask(**{item.name: getattr(flags, item.name) for item in fields(RequestedTask)})


def run_on_cloud(
    script: Path | None,
    arguments: Sequence[str],
    planning: Any,
    placement: RequestedPlacement,
    supervision: Any,
    flags: SkyPilotFlags,
    *,
    detach: bool,
    json: bool,
) -> int:
    """Submit or resume a run, follow it unless it is detached, and return the exit status."""
    from dsplan.cli.submitted import begins_anew, words_of
    from planner.emit.clouds import managed_job
    from planner.errors import ContradictoryRequest
    from strategies.launch.skypilot import submitted
    from strategies.launch.skypilot.request import price_of, requested_job
    from strategies.launch.skypilot.service import SkyPilot
    from strategies.launch.submitted_runs import refuse_but

    requested = requested_task(flags)
    if planning.run_dir is not None:
        raise ContradictoryRequest("--run-dir: a run's directory is on its nodes and goes away with them; leave it out")
    if not begins_anew(script, planning, placement, supervision):
        refuse_but(requested, why="belongs to the job, whose task --resume takes from SkyPilot")
        service = SkyPilot()
        record = submitted.resume(service, str(supervision.resume))
        notice(f"managed job {record.number} resumes {record.name}")
        return _follow(service, record, detach=detach, json=json)
    assert script is not None
    left_out = ("resume", "resume_from", "checkpoint_dir")
    job = requested_job(
        requested,
        placement,
        (*words_of(planning, ("plan", "nproc", "run_dir")), *words_of(supervision, left_out)),
        script=script,
        arguments=arguments,
        processes=planning.nproc,
        plan_file=planning.plan,
        checkpoint_directory=supervision.checkpoint_dir,
        grace_seconds=supervision.grace_seconds,
    )
    if "workdir" in job.task:
        notice(f"{job.task['workdir']} is sent to the nodes, without what its .skyignore or .gitignore names")
    if price := price_of(planning.plan, job.nodes):
        notice(price)
    service = SkyPilot()
    record = submitted.submit(service, managed_job(job))
    notice(f"managed job {record.number}, {record.name}: {job.nodes} node{'s' if job.nodes > 1 else ''}")
    return _follow(service, record, detach=detach, json=json)


def watch_on_cloud(name: str, *, once: bool, json: bool) -> int:
    """Show a managed job as it is, and unless `once` follow it; the end of the following changes nothing."""
    from dsplan.cli.submitted import TAIL, watch
    from dsplan.render.show import show_json
    from strategies.launch.skypilot.service import SkyPilot
    from strategies.launch.skypilot.submitted import FollowedJob, find_job, job_to_dict, words_on

    service = SkyPilot()
    record = find_job(service, name)
    if json:
        show_json(job_to_dict(record, None))
    elif once:
        print(words_on(record))
    else:
        return watch(FollowedJob(service, record, None, tail=TAIL))
    return 0


def _follow(service: SkyPilot, record: Record, *, detach: bool, json: bool) -> int:
    from dsplan.cli.submitted import follow
    from strategies.launch.skypilot.submitted import FollowedJob, job_to_dict

    def document(outcome: Outcome | None) -> dict[str, Any]:
        return job_to_dict(service.look(record.number) or record, outcome)

    run = partial(FollowedJob, service, record)
    return follow(record.name, "--launcher skypilot", run, document, detach=detach, json=json)
