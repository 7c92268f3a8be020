"""From the flags of `dsplan bench` to a benchmark plan, and from that to a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dsplan.diagnostics.bench.plan import (
    BenchPlan,
    Wanted,
    default_ranks,
    load_bench_plan,
    make_bench_plan,
    parse_ranks,
)
from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.probe import probe
from hardware_db.records import dataclass
from planner import limits
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.types.cluster import Cluster

if TYPE_CHECKING:
    from dsplan.diagnostics.bench.session import Event, Measured, Refused
    from hardware_db.probe import Machine

_RANKS_PER_CORE = 4
"""More processes than this would measure the scheduler of the operating system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchQuestion:
    """The flags of `dsplan bench`; a field is named as its flag."""

    gpus: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    node_type: str | None = None
    interconnect: str | None = None
    cluster: Path | None = None
    ranks: str | None = None
    quick: bool = False
    minutes: float | None = None
    only: str | None = None
    model: str | None = None
    again: bool = False
    plan: Path | None = None
    generate: bool = False

    @property
    def names_hardware(self) -> bool:
        """True if a flag names hardware other than this machine's."""
        named = (self.gpus, self.gpu, self.nodes, self.node_type, self.interconnect, self.cluster)
        return any(value is not None for value in named)

    def check(self) -> None:
        """Hold the flags against each other.

        Raises:
            ContradictoryRequest: two of them cannot both hold, or a number is none.
        """
        limits.BENCH_MINUTES.check("--minutes", self.minutes)
        if self.plan is not None and (self.generate or self.quick or self.only or self.model or self.ranks):
            raise ContradictoryRequest(
                "--plan says what to measure; drop --ranks, --quick, --only, --model and --generate, or drop --plan"
            )
        if self.names_hardware and not self.generate:
            raise ContradictoryRequest(
                "--gpus, --gpu, --nodes, --node-type, --interconnect and --cluster describe hardware to --generate a"
                " plan for; a benchmark measures the machine it runs on, with --ranks processes"
            )


@dataclass(slots=True)
class BenchReport:
    """Report of a benchmark.

    `stored` were in the database before, `found` were measured by others meanwhile, `left` wait for the next call,
    `learnt` says what its training runs taught the time model.
    """

    plan: BenchPlan
    database: Path
    fingerprint: str
    stored: int = 0
    found: int = 0
    left: int = 0
    seconds: float = 0.0
    learnt: str = ""
    measured: list[Measured] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 where something was to be measured and nothing could be."""
        return int(bool(self.refused) and not self.measured and not self.stored)


def plan_of(question: BenchQuestion) -> BenchPlan:
    """Return what to measure: what the file says, or what the flags mean on the hardware they name or on this machine.

    Raises:
        DsplanError: a flag, a name or the file cannot be used.
    """
    question.check()
    if question.plan is not None:
        return load_bench_plan(question.plan)
    from dsplan.exact.factory import any_model

    cluster = _cluster(question)
    wanted = Wanted(
        ranks=default_ranks(cluster) if question.ranks is None else parse_ranks(question.ranks),
        kinds=tuple(kind.strip() for kind in question.only.split(",")) if question.only else (),
        model=None if question.model is None else any_model(question.model),
        quick=question.quick,
        deepspeed=question.generate or find_spec("deepspeed") is not None,
    )
    return make_bench_plan(wanted, cluster)


def run_plan(plan: BenchPlan, question: BenchQuestion, show: Callable[[Event], None]) -> BenchReport:
    """Measure what the plan says and is not stored, and show what happens.

    Raises:
        DsplanError: the plan is for another machine, torch is missing, or the database cannot be used.
    """
    if find_spec("torch") is None:
        raise DsplanError("torch is not installed here, and a benchmark needs it; pip install 'dsplan[train]'")
    from dsplan.diagnostics.bench.session import BenchSession, Limits
    from hardware_db.files import database_path
    from hardware_db.fingerprint import fingerprint
    from hardware_db.store import open_store

    machine = probe()
    _check_machine(plan, machine, question.plan)
    limits = Limits(again=question.again, seconds=None if question.minutes is None else 60 * question.minutes)
    report = BenchReport(plan=plan, database=database_path(), fingerprint=fingerprint(machine).key)
    started = time.monotonic()
    with open_store() as store, closing(BenchSession(plan, machine, store, limits).events()) as session:
        for event in session:
            _note(report, event)
            show(event)
    report.learnt = _learn(report, machine)
    report.seconds = time.monotonic() - started
    return report


def _cluster(question: BenchQuestion) -> Cluster:
    if not question.names_hardware:
        return probed_cluster(probe())
    return resolve_cluster(
        HardwareRequest(
            gpus=question.gpus,
            gpu=question.gpu,
            nodes=question.nodes,
            node_type=question.node_type,
            interconnect=question.interconnect,
            cluster_file=None if question.cluster is None else str(question.cluster),
        )
    )


def _check_machine(plan: BenchPlan, machine: Machine, file: Path | None) -> None:
    here = probed_cluster(machine)
    if not here.device.is_cpu and machine.software.torch_cuda == "cpu":
        raise DsplanError(
            f"this machine has {here.device.name} and its torch is built for CPUs; install a torch built for CUDA"
        )
    if plan.device != here.device.name:
        raise BrokenFile(
            file, f"is a benchmark of {plan.device} and this machine has {here.device.name}", "run it on the former"
        )
    if not here.device.is_cpu and plan.most_ranks > here.gpus_per_node:
        raise DsplanError(
            f"the benchmark needs {plan.most_ranks} GPUs in this machine and there are {here.gpus_per_node}; use"
            f" --ranks {here.gpus_per_node} or fewer"
        )
    cores = machine.host.usable_cores or 1
    if here.device.is_cpu and plan.most_ranks > _RANKS_PER_CORE * cores:
        raise DsplanError(
            f"the benchmark needs {plan.most_ranks} processes at once on {cores} CPU cores; use --ranks"
            f" {_RANKS_PER_CORE * cores} or fewer"
        )


def _learn(report: BenchReport, machine: Machine) -> str:
    """Calibrates with the new training runs, as `dsplan run` does after each; what came of it in a sentence."""
    from dsplan.diagnostics.bench.cases import TrainingCase
    from dsplan.diagnostics.recorded_runs import learnt

    trained = any(isinstance(event.work, TrainingCase) for event in report.measured)
    return learnt(machine).removeprefix("; ") if trained else ""


def _note(report: BenchReport, event: Event) -> None:
    from dsplan.diagnostics.bench import session

    if isinstance(event, session.Begun):
        report.stored = event.stored
    elif isinstance(event, session.MeasuredElsewhere):
        report.found += 1
    elif isinstance(event, session.Measured):
        report.measured.append(event)
    elif isinstance(event, session.Refused):
        report.refused.append(event)
    elif isinstance(event, session.TimeIsUp):
        report.left = event.left
