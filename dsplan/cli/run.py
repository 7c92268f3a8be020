"""`dsplan run`: start a training script under a plan, watch it, and compare it with what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from dsplan.cli.flags import GroupedCommand, JsonFlag, among, number, with_flags
from dsplan.cli.kubernetes import KubernetesFlags
from dsplan.cli.skypilot import SkyPilotFlags
from dsplan.cli.submitted import SUBMITTED
from hardware_db.notices import notice
from hardware_db.records import dataclass
from planner import limits
from planner import vocabulary as words
from planner.question_defaults import LORA_RANK
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.launch.policy import RETRIES
from strategies.run_directory.spec import LauncherName
from strategies.supervision.autosave_interval import CHECKPOINT_MINUTES
from strategies.supervision.hang_detection import HANG_SECONDS

if TYPE_CHECKING:
    from dsplan.diagnostics.metrics_endpoint import RunCollector
    from dsplan.diagnostics.metrics_otlp import OtlpTarget
    from strategies.launch.prepare import RunRequest
    from strategies.launch.report import RunReport

Part = TypeVar("Part")
RunLauncher = Literal[LauncherName, "kubernetes", "skypilot"]
"""On a cluster or a cloud a job's nodes start the ranks, each with the local launcher."""


def directory_or_address(text: str) -> Path:
    """Return the directory that a text names, or the address of an object store."""
    from strategies.checkpoint.object_store import location

    return location(text)


# The flags of `dsplan run`: the plan, where ranks start, and how the run is watched over.


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningFlags:
    """Plan, strategy and method of a run."""

    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Run this plan instead of making one.")] = None
    nproc: Annotated[
        int | None, number(limits.PROCESSES, "Processes per node; by default one per GPU, two without a GPU.")
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan within this strategy only, such as fsdp or zero2.",
            autocompletion=among("planner.vocabulary:STRATEGIES"),
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for this backend only: torch, deepspeed, or native, our own ZeRO.",
            autocompletion=among("planner.vocabulary:BACKENDS"),
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES|DIR",
            help="How fast ranks are, in order, such as 3x1,1x0.5, or the run that measured it: slower ones get less.",
        ),
    ] = None
    shard: Annotated[
        int | None, number(limits.GPUS, "Ranks that share one set of states; by default what the strategy says.")
    ] = None
    tp: Annotated[int | None, number(limits.GPUS, "Ranks that split every layer.")] = None
    pp: Annotated[int | None, number(limits.GPUS, "Ranks that split the stack of layers.")] = None
    cp: Annotated[int | None, number(limits.GPUS, "Ranks that split every sequence.")] = None
    ep: Annotated[int | None, number(limits.GPUS, "Ranks that routed experts are spread over.")] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether tp ranks split the sequence between their products; by default where experts are spread too.",
        ),
    ] = None
    pp_schedule: Annotated[
        words.Schedule | None, typer.Option(help="Order of a pipeline's forwards and backwards; 1f1b by default.")
    ] = None
    virtual_stages: Annotated[int | None, number(limits.GPUS, "Stages per rank of an interleaved pipeline.", "V")] = (
        None
    )
    method: Annotated[
        words.Method | None,
        typer.Option(help="Train all weights, or adapters beside frozen ones, which dsplan.initialize puts in."),
    ] = None
    lora_rank: Annotated[int | None, number(limits.SAMPLES, f"Rank of the adapters; {LORA_RANK} by default.", "N")] = (
        None
    )
    lora_targets: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="attention, all-linear (the default), names, or a pattern of module names."),
    ] = None
    train_only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Train only weights whose names match; the rest is frozen.")
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose kernels run: auto, torch, liger, or KERNEL=NAME,... for some."),
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where logs and metrics go; by default a new one per run.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementFlags:
    """Launcher of the ranks, and their nodes."""

    launcher: Annotated[
        RunLauncher | None, typer.Option(help="Who starts the ranks; local by default, on this machine.")
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
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT", help="The Ray cluster of --launcher ray; without it, a Ray of this machine alone."
        ),
    ] = None
    launcher_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="For srun, mpirun, deepspeed, accelerate as it is, or a resource of Ray, a pod, SkyPilot; repeatable.",
        ),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", help="With kubernetes or skypilot: submit the job, and do not follow it.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionFlags:
    """Checkpoints, restarts and stops of a run."""

    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|s3://BUCKET/PREFIX",
            parser=directory_or_address,
            help="Resume, without SCRIPT, the run of this run directory, --checkpoint-dir in a store, or job.",
        ),
    ] = None
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT|start",
            help="With --resume: resume from this checkpoint instead of the newest, or begin anew.",
        ),
    ] = None
    retries: Annotated[
        int | None,
        number(limits.RETRIES, f"Restarts in a row without progress; {RETRIES}, or 0 where nothing can be resumed."),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|s3://BUCKET/PREFIX",
            parser=directory_or_address,
            help="Where ranks save by themselves, or gs://, az://; in the run directory by default.",
        ),
    ] = None
    checkpoint_steps: Annotated[int | None, number(limits.STEPS, "Save after every so many steps.", "K")] = None
    checkpoint_minutes: Annotated[
        float | None,
        number(limits.MINUTES, f"Save every so many minutes; {CHECKPOINT_MINUTES:g}, or 0 for not by the clock.", "M"),
    ] = None
    mttf_hours: Annotated[
        float | None,
        number(limits.MTTF_HOURS, "Mean hours between failures: save as often as is best for them.", "H"),
    ] = None
    hang_minutes: Annotated[
        float | None,
        number(limits.MINUTES, f"Restart after so long without progress; {HANG_SECONDS / 60:g}, or 0 for never.", "M"),
    ] = None
    grace_seconds: Annotated[
        float | None,
        number(limits.GRACE_SECONDS, f"Time to save after SIGTERM or SIGUSR1; {GRACE_SECONDS:g} by default.", "S"),
    ] = None
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the first steps and switch to a better plan where one is found.")
    ] = False
    track: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Send every step to tensorboard, wandb, mlflow, trackio; from beside the ranks.",
            autocompletion=among("strategies.launch.options:TRACKERS"),
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="STEP|FIRST:LAST",
            help="Leave a Chrome trace and a memory snapshot of these steps in the run directory, for every rank.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        number(limits.PORTS, "Serve Prometheus metrics of the run at this port; from beside the ranks.", "PORT"),
    ] = None
    metrics_host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address of the metrics; by default only this machine reaches them."),
    ] = None
    otlp: Annotated[
        bool,
        typer.Option("--otlp", help="Send the same metrics to an OpenTelemetry collector, where OTEL_ variables say."),
    ] = False
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send them to this collector, such as http://localhost:4318.")
    ] = None


run = typer.Typer(add_completion=False, rich_markup_mode=None)


# Options behind the script belong to the script.
@run.command(
    "run",
    cls=GroupedCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@with_flags
def run_script(
    planning: PlanningFlags,
    placement: PlacementFlags,
    supervision: SupervisionFlags,
    kubernetes: KubernetesFlags,
    skypilot: SkyPilotFlags,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="The Python file that trains your model.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Everything after the script is the script's own.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train with SCRIPT under a plan: the one given, or one made from the script's own model and this machine."""
    from dsplan.diagnostics.metrics_endpoint import serve_metrics
    from dsplan.diagnostics.metrics_otlp import otlp_target

    _check_launcher_flags(placement, kubernetes, skypilot)
    if placement.launcher in SUBMITTED:
        raise typer.Exit(
            _run_elsewhere(script, arguments or (), planning, placement, supervision, kubernetes, skypilot, json=json)
        )
    target = otlp_target(supervision.otlp_endpoint, wanted=supervision.otlp)
    with serve_metrics(supervision.metrics_port, supervision.metrics_host) as metrics:
        exit_code = _run(_request(script, arguments, planning, placement, supervision), metrics, target, json=json)
    raise typer.Exit(exit_code)


def _check_launcher_flags(placement: PlacementFlags, kubernetes: KubernetesFlags, skypilot: SkyPilotFlags) -> None:
    """Refuse flags of a launcher that submits a job, for a run of another.

    Raises:
        ContradictoryRequest: one is there.
    """
    from planner.errors import ContradictoryRequest
    from strategies.launch.submitted_runs import refuse_elsewhere

    if placement.launcher != "kubernetes":
        refuse_elsewhere(kubernetes, "kubernetes")
    if placement.launcher != "skypilot":
        refuse_elsewhere(skypilot, "skypilot")
    if placement.detach and placement.launcher not in SUBMITTED:
        raise ContradictoryRequest("--detach is for --launcher kubernetes or skypilot; name one, or leave it out")


def _run_elsewhere(
    script: Path | None,
    arguments: Sequence[str],
    planning: PlanningFlags,
    placement: PlacementFlags,
    supervision: SupervisionFlags,
    kubernetes: KubernetesFlags,
    skypilot: SkyPilotFlags,
    *,
    json: bool,
) -> int:
    """Run the command on the nodes of a cluster or a cloud, and return the exit status."""
    from dsplan.cli.kubernetes import run_on_cluster
    from dsplan.cli.skypilot import run_on_cloud
    from strategies.launch.options import RequestedPlacement

    placed = _part(RequestedPlacement, replace(placement, launcher=None))
    words, detach = (script, arguments, planning, placed, supervision), placement.detach
    if placement.launcher == "skypilot":
        return run_on_cloud(*words, skypilot, detach=detach, json=json)
    return run_on_cluster(*words, kubernetes, detach=detach, json=json)


def _run(request: RunRequest, metrics: RunCollector, target: OtlpTarget | None, *, json: bool) -> int:
    """Run a request to its end, print its last page, and return the exit status."""
    from dsplan.diagnostics.metrics_otlp import OtlpExporter
    from dsplan.diagnostics.recorded_runs import record_attempt, record_run
    from dsplan.diagnostics.tracking.feed import Tracking
    from dsplan.render.run_report import report_blocks, report_to_dict
    from dsplan.render.run_view import RunView
    from dsplan.render.show import say, show, show_json
    from strategies.launch.prepare import prepare
    from strategies.launch.reported_runs import RunReporter
    from strategies.launch.supervisor import Supervisor

    launch = prepare(*_understood(request))
    metrics.follow(launch.spec.directory)
    for sentence in filter(None, (*launch.notices, _warn_of_strays(launch.script, launch.spec.arguments))):
        notice(sentence)
    companions = (
        Tracking(launch.spec.directory, launch.spec.trackers),
        RunReporter(launch.spec),
        OtlpExporter(launch.spec, target),
    )
    session = Supervisor(
        launch.spec, launch.plan, companions, record_attempt, resumes=launch.resumes, resume_from=launch.resume_from
    )
    with RunView(ranks=launch.ranks, out=sys.stderr if json else sys.stdout) as view:
        for event in session.events():
            view.show(event)
    report = session.report()
    stored = record_run(report)
    _keep_page(report, stored.sentence)
    if json:
        show_json(report_to_dict(report, stored))
    else:
        show(report_blocks(report, reason_follows=True))
        say(stored.sentence)
    if report.outcome.reason:
        where = f"rank {report.outcome.rank}: " if report.outcome.rank is not None else ""
        log = f"; log: {report.outcome.log}" if report.outcome.log is not None else ""
        notice(f"{where}{report.outcome.reason}{log}")
    return report.outcome.exit_code


def _keep_page(report: RunReport, stored: str) -> None:
    """Keep the last page in the run directory; a disk that is full then does not change how the run ended."""
    from dsplan.render.run_report import write_report
    from strategies.run_directory.files import REPORT_FILE

    try:
        write_report(report, stored)
    except OSError as problem:
        notice(f"{REPORT_FILE}: {problem.strerror}")


def _warn_of_strays(script: Path, arguments: Sequence[str]) -> str | None:
    """Return a warning of options of this command behind a script that knows none of their names."""
    groups = (PlanningFlags, PlacementFlags, SupervisionFlags, KubernetesFlags, SkyPilotFlags)
    ours = {f"--{item.name.replace('_', '-')}" for group in groups for item in fields(group)} | {"--json"}
    source = script.read_text(errors="replace")
    strays = [word for word in (text.partition("=")[0] for text in arguments) if word in ours and word not in source]
    if not strays:
        return None
    return f"{', '.join(strays)} after the script is the script's; options of dsplan run stand before it"


def _request(
    script: Path | None,
    arguments: list[str] | None,
    planning: PlanningFlags,
    placement: PlacementFlags,
    supervision: SupervisionFlags,
) -> RunRequest:
    from strategies.launch.options import (
        RequestedPlacement,
        RequestedSupervision,
        parse_kernels,
        parse_profile,
        parse_rates,
        parse_trackers,
    )
    from strategies.launch.prepare import RunRequest
    from strategies.run_directory.request import PlanRequest, RequestedDegrees, RequestedMethod

    return RunRequest(
        script=script,
        arguments=tuple(arguments or ()),
        processes=planning.nproc,
        plan=PlanRequest(
            plan_file=None if planning.plan is None else str(planning.plan),
            strategy=planning.strategy,
            backend=planning.backend,
            rates=None if planning.rates is None else parse_rates(planning.rates),
            degrees=_part(RequestedDegrees, planning),
            method=_part(RequestedMethod, planning),
            kernels=parse_kernels(planning.kernels),
        ),
        run_directory=planning.run_dir,
        resume=supervision.resume,
        resume_from=supervision.resume_from or "",
        trackers=() if supervision.track is None else parse_trackers(supervision.track),
        profile="" if supervision.profile is None else parse_profile(supervision.profile),
        placement=_part(RequestedPlacement, placement),
        supervision=_part(RequestedSupervision, supervision),
    )


def _part(kind: type[Part], flags: Any) -> Part:
    """Return the part of a request whose fields have the names of flags."""
    return kind(**{item.name: getattr(flags, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def _understood(request: RunRequest) -> tuple[RunRequest, tuple[str, ...]]:
    """Return the request with the script that a command of another launcher starts, and what to tell of that."""
    if request.script is None or request.script.suffix == ".py":
        return request, ()
    from dsplan.commands import understand  # with all readers of launchers

    return understand(request)
