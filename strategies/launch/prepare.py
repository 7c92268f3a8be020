"""From what was asked on the command line to a launch: every check that can be made before a process starts."""

from __future__ import annotations

import ast
import importlib.util
import os
import time
import uuid
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.files import runs_dir
from hardware_db.probe import Machine, probe
from planner import limits
from planner import vocabulary as words
from planner.cluster.probed import probed_cluster
from planner.cost.combinations import Adapted, why_refused
from planner.errors import ContradictoryRequest, UnknownName
from planner.search.request import WITHOUT_DEEPSPEED, why_not_deepspeed
from planner.types.plan import Plan
from planner.types.plan_io import load_plan
from strategies.checkpoint.object_store import ObjectPath, location, require_usable
from strategies.launch.device import Decision, decide
from strategies.launch.options import DEFAULT_SUPERVISION, RequestedPlacement, RequestedSupervision, check_trackers
from strategies.launch.run_record import fetched
from strategies.launch.state import BEGIN_ANEW, check_unfinished
from strategies.run_directory.claim import claimed_kind, saves_itself
from strategies.run_directory.files import SPEC_FILE
from strategies.run_directory.request import PlanRequest, RequestedMethod, named
from strategies.run_directory.spec import (
    LauncherName,
    LaunchSpec,
    Placement,
    ScriptStart,
    SupervisionOptions,
)
from strategies.variables import PROFILE, RUN_DIRECTORY, RUN_ID

# Checks of the placement flags, before anything is started.


# Which launchers read which field; the local one needs no host file because the command runs on every node.
_READ_BY: dict[str, tuple[LauncherName, ...]] = {
    "rendezvous": ("local", "accelerate"),
    "hostfile": ("deepspeed", "mpi"),
    "node_rank": ("deepspeed", "accelerate"),
    "ray_address": ("ray",),
    "options": ("slurm", "mpi", "ray", "deepspeed", "accelerate"),
}
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in ("rendezvous", "hostfile", "node_rank", "ray_address")}


def check_placement(placement: Placement, supervision: SupervisionOptions) -> None:
    """Refuse flags that the launcher would not read, and several nodes that could not meet or share checkpoints.

    Raises:
        ContradictoryRequest: one line says which flag and what to do.
    """
    name = placement.launcher
    for name_of_field, launchers in _READ_BY.items():
        if getattr(placement, name_of_field) not in (None, ()) and name not in launchers:
            flag = _FLAGS.get(name_of_field, "--launcher-option")
            raise ContradictoryRequest(
                f"{flag} is for --launcher {' or '.join(launchers)}, and this run's is {name}; leave it out"
            )
    if name != "local":
        if placement.is_elastic and name != "ray":
            raise ContradictoryRequest(
                f"--nodes {placement.least_nodes}:{placement.most_nodes}: nodes come and go with the local launcher"
                f" and Ray's only; give --launcher {name} one number"
            )
        if name == "ray" and placement.most_nodes > 1 and placement.ray_address is None:
            raise ContradictoryRequest(
                f"--nodes {placement.most_nodes}: without --ray-address a Ray of this machine alone is started; name"
                " the address of a cluster, or leave --nodes out"
            )
        return
    if placement.most_nodes > 1 and placement.rendezvous is None:
        raise ContradictoryRequest(
            f"--nodes {placement.most_nodes} needs --rendezvous HOST:PORT, an address of one of them that all reach,"
            " the same on every node; or name a --launcher that starts all nodes itself"
        )
    if placement.most_nodes == 1 and placement.rendezvous is not None:
        raise ContradictoryRequest("--rendezvous is where several nodes meet; add --nodes, or leave it out")
    if placement.most_nodes > 1 and not supervision.checkpoint_directory:
        raise ContradictoryRequest(
            "several nodes need --checkpoint-dir, a directory that all of them see, to save together and to resume from"
        )


# Two processes on a machine without GPUs: the smallest number that shows what a strategy does.
_CPU_PROCESSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A command line of `dsplan run`; None, or nothing, is left open."""

    script: Path | None = None
    """A script, or the first word of a command that starts one."""
    arguments: tuple[str, ...] = ()
    """The script's own, or the rest of the command."""
    start: ScriptStart = field(default_factory=ScriptStart)
    """What the command hands to the script beside them."""
    processes: int | None = None
    """Per node."""
    plan: PlanRequest = field(default_factory=PlanRequest)
    run_directory: Path | None = None
    resume: Path | None = None
    """The directory of a run to resume, or where its checkpoints are in a store; it fills in what is left open."""
    resume_from: str = ""
    """The checkpoint to resume from, or `start`; empty: the newest."""
    trackers: tuple[str, ...] = ()
    profile: str = ""
    """Steps, as FIRST:LAST."""
    placement: RequestedPlacement = field(default_factory=RequestedPlacement)
    supervision: RequestedSupervision = field(default_factory=RequestedSupervision)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A checked request. `plan` is None when the ranks will plan from the live model, or nothing will."""

    spec: LaunchSpec
    script: Path
    plan: Plan | None
    device_notice: str = ""
    command_notices: tuple[str, ...] = ()
    resumes: bool = False
    resume_from: str = ""

    @property
    def ranks(self) -> int:
        """Ranks of the whole run, at the most."""
        return self.spec.processes * self.spec.placement.most_nodes

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines for people before the ranks start."""
        lines = [*self.command_notices, *([self.device_notice] if self.device_notice else [])]
        if self.resumes and saves_itself(self.spec.directory):
            lines.append(f"{self.script} resumes from what its own code loads: dsplan keeps no checkpoint of it")
        return tuple(lines)


def prepare(request: RunRequest, notices: tuple[str, ...] = ()) -> Launch:
    """Check the request against this machine and lay out its run directory; `notices` are told before its own.

    Raises:
        DsplanError: the script, the plan, or this machine does not allow the run; one line says which and what to do.
    """
    if isinstance(request.resume, ObjectPath):
        with fetched(
            request.resume,
            lambda script: _lay_out(replace(request, resume=None), script),
            has_script=request.script is not None,
            has_options=bool(request.placement.launcher_option),
        ) as directory:
            return prepare(replace(request, resume=directory, run_directory=None), notices)
    earlier = None
    if request.resume is not None:
        earlier = _unfinished(request, request.resume)
        request = _continue(request, earlier)
    elif request.resume_from:
        raise ContradictoryRequest("--resume-from says from where --resume resumes a run; add --resume DIR")
    if request.script is None:
        raise DsplanError("SCRIPT is missing; name the Python file that trains your model, or --resume a run")
    check_script(request.script)
    _check_plan_request(request.plan)
    if importlib.util.find_spec("torch") is None:
        raise DsplanError("torch is not installed here, and a run needs it; pip install 'dsplan[train]'")
    check_trackers(request.trackers)
    plan = None if request.plan.plan_file is None else load_plan(request.plan.plan_file)
    placement = request.placement.over(earlier.placement if earlier else Placement())
    decision = decide(probe(), placement)
    gpus = decision.gpus
    supervision = request.supervision.over(earlier.supervision if earlier else DEFAULT_SUPERVISION)
    processes = _processes(request, plan, placement, gpus, earlier)
    _check_degrees(request, processes, placement)
    check_placement(placement, supervision)
    if plan is not None and not placement.is_judged_there:
        _check_precision(request, plan, decision.machine)
    if placement.launcher == "local" and supervision.checkpoint_directory:
        _check_writable(location(supervision.checkpoint_directory))
    directory = _lay_out(request, request.script)
    given_id = os.environ.get(RUN_ID, "")
    spec = LaunchSpec(
        script=str(request.script.resolve()),  # can be read from every directory that it is resumed in
        arguments=request.arguments,
        processes=processes,
        run_directory=str(directory),
        environment=_environment(request, directory, decision),
        placement=placement,
        supervision=supervision,
        run_id=(earlier and earlier.run_id) or given_id or uuid.uuid4().hex,
        trackers=request.trackers,
        start=request.start,
    )
    return Launch(
        spec=spec,
        script=request.script,
        plan=plan,
        device_notice=decision.notice,
        command_notices=notices,
        resumes=request.resume is not None or bool(given_id),
        resume_from=_resume_from(request),
    )


def check_script(path: Path) -> None:
    """Refuse a script that this interpreter would not run."""
    if not path.exists():
        raise BrokenFile(path, "no such script", "name the Python file that trains your model")
    if not path.is_file():
        raise BrokenFile(path, "is not a file", "name the Python file that trains your model")
    try:
        ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BrokenFile(path, f"is not Python that this interpreter reads: {reason}{line}") from None
    except OSError as error:
        raise BrokenFile(path, f"cannot be read: {error.strerror}") from None


def _check_plan_request(request: PlanRequest) -> None:
    """Judge what is asked of the planning, as far as possible before the script is seen to train.

    Raises:
        ContradictoryRequest, UnknownName: one line says which flag and what to do.
    """
    strategy, backend = request.strategy, request.backend
    for word, name, names in (("strategy", strategy, words.STRATEGIES), ("backend", backend, words.BACKENDS)):
        if name is not None and request.plan_file is not None:
            raise ContradictoryRequest(f"--plan and --{word} cannot both decide; leave one out")
        if name is not None and name not in names:
            raise UnknownName(word, name, names, hint="one of " + ", ".join(names))
    if request.plan_file is not None and (decided := {**named(request.degrees), **named(request.method)}):
        flag = f"--{next(iter(decided)).replace('_', '-')}"
        raise ContradictoryRequest(f"--plan and {flag} cannot both decide; leave one out")
    if request.rates is not None and request.plan_file is not None:
        raise ContradictoryRequest("--plan and --rates cannot both decide; leave one out")
    _check_method(request.method)
    if strategy is not None and backend is not None and backend not in (able := words.backends_of(strategy)):
        raise ContradictoryRequest(
            f"--backend {backend} does not run {strategy}; {' or '.join(able)} does, or leave one of them out"
        )


def _check_method(requested: RequestedMethod) -> None:
    """Refuse flags of adapters without a method that has them, or with a pattern of weights.

    Raises:
        ContradictoryRequest: one line says which flag and what to do.
    """
    has_adapters = requested.method not in (None, "full")
    for name in ("lora_rank", "lora_targets"):
        if getattr(requested, name) is not None and not has_adapters:
            raise ContradictoryRequest(f"--{name.replace('_', '-')} is for --method lora, qlora or dora; name one")
    if has_adapters and requested.train_only is not None:
        raise ContradictoryRequest(f"--train-only says what --method {requested.method} says too; leave one out")


def _check_degrees(request: RunRequest, processes: int, placement: Placement) -> None:
    """Refuse degrees that no model could be split by on so many ranks.

    Raises:
        ContradictoryRequest: they do not divide the ranks. Fewer ranks than before plan anew.
    """
    degrees = {name: getattr(request.plan.degrees, name) or 1 for name in ("tp", "pp", "cp")}
    sharing, ranks = prod(degrees.values()), processes * placement.most_nodes
    if ranks % sharing and request.resume is None:
        flags = [f"--{name} {degree}" for name, degree in degrees.items() if degree > 1]
        product = f"{' x '.join(flags)} = {sharing}" if len(flags) > 1 else flags[0]
        raise ContradictoryRequest(
            f"{product} does not divide the {ranks} processes; use --nproc {ranks + -ranks % sharing}, or"
            " another degree"
        )


def _resume_from(request: RunRequest) -> str:
    """Return the checkpoint to resume from, absolute, as ranks may be elsewhere; `start` and empty stay."""
    named = request.resume_from
    if not named or request.resume is None:
        return ""
    kind = claimed_kind(request.resume)
    if saves_itself(request.resume):
        raise ContradictoryRequest(
            f"--resume-from: dsplan loads no checkpoint for {request.script}, whose own code does; leave it out"
        )
    if named == BEGIN_ANEW:
        return named
    path = location(named).absolute()
    states = {"huggingface": ("trainer_state.json",), None: ("state.json", "trainer_state.json")}
    possible = states.get(kind, ("state.json",))
    if not any((path / state).is_file() for state in possible):
        state = " or ".join(possible)
        lacks = f"this is no checkpoint ({state} is not there)"
        raise DsplanError(f"--resume-from {named}: {lacks}; name one, or {BEGIN_ANEW}")
    return str(path)


def _processes(
    request: RunRequest, plan: Plan | None, placement: Placement, gpus: int, earlier: LaunchSpec | None
) -> int:
    """Return the processes to start on a node: the plan's, those requested, one per GPU, or two without a GPU.

    A run that continues takes as many as before where there are GPUs for them, whatever its plan says: plans are made
    anew for other ranks.
    """
    if request.processes is not None and not limits.PROCESSES.allows(request.processes):
        raise DsplanError(f"--nproc {request.processes} is not a number of processes; use 1 to {limits.PROCESSES.most}")
    if earlier is not None:
        processes = request.processes or (min(earlier.processes, gpus) if gpus else earlier.processes)
    else:
        of_plan = _plan_processes(request, plan, placement) if plan else None
        processes = of_plan or request.processes or gpus or _CPU_PROCESSES
    if gpus and processes > gpus and not placement.is_judged_there:
        remedy = f"make a plan with --gpus {gpus}" if plan else f"use --nproc {gpus} or fewer"
        raise DsplanError(f"{processes} processes need {processes} GPUs and this machine has {gpus}; {remedy}")
    return processes


def _plan_processes(request: RunRequest, plan: Plan, placement: Placement) -> int:
    configuration = plan.configuration
    work = plan.workload
    adapted = Adapted(method=work.get("method", "full"), load_dtype=work.get("load_dtype"))
    if why := why_refused(configuration, adapted):
        raise DsplanError(f"{request.plan.plan_file}: {why}")
    nodes = plan.cluster.get("nodes", 1)
    if len({group.get("gpus_per_node") for group in plan.cluster.get("groups", [])}) > 1:
        raise DsplanError(
            f"{request.plan.plan_file}: its nodes have unlike numbers of GPUs, and dsplan run starts as many ranks on"
            " each; start them with mpirun or srun, and give the plan to dsplan.initialize(plan=...)"
        )
    if nodes > 1 and not placement.least_nodes <= nodes <= placement.most_nodes:
        raise DsplanError(
            f"{request.plan.plan_file}: the plan spans {nodes} nodes and this run has {placement.most_nodes}; add"
            f" --nodes {nodes} and run the command on every node, or use --launcher"
        )
    processes = configuration.world_size // (placement.most_nodes if nodes == 1 else nodes)
    if request.processes not in (None, processes):
        raise ContradictoryRequest(
            f"--nproc {request.processes} contradicts {request.plan.plan_file}, which is for {processes}"
            " processes; leave --nproc out"
        )
    return max(1, processes)


def _check_precision(request: RunRequest, plan: Plan, machine: Machine) -> None:
    chosen = plan.configuration
    lacks = why_not_deepspeed(probed_cluster(machine).device, chosen.precision)
    if lacks and chosen.backend == "deepspeed":
        raise DsplanError(f"{request.plan.plan_file}: {lacks}; plan again: {WITHOUT_DEEPSPEED}")


def _check_writable(directory: Path) -> None:
    if isinstance(directory, ObjectPath):
        require_usable(directory)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        why = None if os.access(directory, os.W_OK | os.X_OK) else "cannot be written"
    except OSError as error:
        why = error.strerror or "cannot be made"
    if why:
        raise DsplanError(f"{directory}: {why}; name a directory that can be written with --checkpoint-dir")


def _lay_out(request: RunRequest, script: Path) -> Path:
    """Return the run directory, which is made where it is a new one."""
    directory = request.run_directory or runs_dir()
    try:
        if request.run_directory is None:
            directory = make_run_directory(directory, script)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or "cannot be made"
        raise DsplanError(f"{directory}: {why}; name a directory that can be written with --run-dir") from error
    if request.resume is None and (directory / SPEC_FILE).exists():
        raise DsplanError(f"{directory}: holds an earlier run; name another --run-dir, or resume it with --resume")
    return directory.resolve()


def _environment(request: RunRequest, directory: Path, decision: Decision) -> dict[str, str]:
    """Return the variables that the ranks of a run get."""
    plan_file = request.plan.plan_file and str(Path(request.plan.plan_file).resolve())
    handed = replace(request.plan, plan_file=plan_file, device=decision.device)
    environment = {**request.start.variables, RUN_DIRECTORY: str(directory), **handed.to_variables()}
    environment |= decision.variables
    if request.profile:
        environment[PROFILE] = request.profile
    return environment


def make_run_directory(parent: Path, script: Path) -> Path:
    """Make a new directory for one run under `parent`, named after the time and the script."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = parent / (f"{stamp}-{script.stem}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(path)


# Options of `dsplan run --resume DIR`: those of the first command, updated by this one's.


def _unfinished(request: RunRequest, directory: Path) -> LaunchSpec:
    """Return the launch of the run to resume.

    Raises:
        DsplanError: there is no run to resume, or one of another version of dsplan, or the request names another
            directory too.
    """
    if request.run_directory is not None:
        raise ContradictoryRequest("--resume continues in its own directory; leave --run-dir out")
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise DsplanError(f"{directory}: {what}; name the run directory that dsplan run printed")
    if not (directory / SPEC_FILE).exists():
        raise DsplanError(f"{directory}: holds no run to resume; name the run directory that dsplan run printed")
    check_unfinished(directory)
    return LaunchSpec.load(directory / SPEC_FILE)


def _continue(request: RunRequest, earlier: LaunchSpec) -> RunRequest:
    """Return the request with what it leaves open of script and plan taken from an earlier launch."""
    own, before = request.plan, PlanRequest.of(earlier.environment)
    decides = replace(own, method=RequestedMethod(), kernels={}) != PlanRequest()
    plan = replace(
        own if decides else before,
        method=own.method if named(own.method) else before.method,
        kernels=own.kernels or before.kernels,
    )
    return replace(
        request,
        script=request.script or Path(earlier.script),
        arguments=request.arguments if request.script else earlier.arguments,
        start=request.start if request.script else earlier.start,
        plan=plan,
        run_directory=request.resume,
        trackers=request.trackers or earlier.trackers,
        profile=request.profile or earlier.environment.get(PROFILE, ""),
    )
