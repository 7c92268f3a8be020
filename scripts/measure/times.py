"""Times whole training steps over a grid of configurations, with dsplan's engine on real ranks.

    python -m scripts.measure.times                              # CPU ranks, hardware_db/measurements/times_cpu.csv
    python -m scripts.measure.times --device cuda --minutes 9    # the GPU of this machine, times_<name>.csv
    python -m scripts.measure.times --only gpt2-14m --again      # some models, timed anew

Configurations that are compared with each other are run by turns, `--rounds` times, so that a machine that is slow for
a while is slow to all of them. Rows are written as soon as such a group is done; what has a row is skipped, so that a
broken-off measurement resumes where it stopped. Ranks talk over gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.measured_rows import SHIPPED, TimeRun, read_time_runs, write_time_runs
from hardware_db.probe import probe
from planner.search.estimate import estimate
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from planner.vocabulary import ZERO_STAGES, Task
from scripts.measure.measured_run import Subject, TimedStep, mean_over_ranks, time_subject
from scripts.measure.memory import Place, place_of
from scripts.measure.memory_grid import Case
from scripts.measure.memory_rows import question
from scripts.measure.time_grid import cpu_grid, gpu_grid

RUN_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of a group: starts of each run, steps timed each time, and the time at which no other begins."""

    rounds: int
    steps: int
    deadline: float


@dataclass(slots=True)
class Turn:
    """A run of the group at hand: the row it will become, its plan, and the steps timed so far."""

    case: Case
    run: TimeRun
    plan: Plan
    steps: list[TimedStep] = field(default_factory=list)
    problem: str = ""


def main() -> None:
    """Time the grid and write its rows."""
    arguments = _arguments()
    machine = place_of(probe(), arguments.device)
    path = arguments.out or SHIPPED / f"times_{machine.columns['device'].split('-')[0].lower()}.csv"
    groups = gpu_grid() if machine.is_gpu else cpu_grid()
    effort = Effort(rounds=arguments.rounds, steps=arguments.steps, deadline=time.monotonic() + 60 * arguments.minutes)
    wanted = [group for group in groups if not arguments.only or group[0].model in arguments.only]
    measure(wanted, machine, path, effort, again=arguments.again)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no group after this many minutes")
    parser.add_argument("--rounds", type=int, default=1, help="how often each run of a group has its turn")
    parser.add_argument("--steps", type=int, default=5, help="steps to time in each turn")
    parser.add_argument("--out", type=Path, help="the CSV file to add to")
    parser.add_argument("--only", nargs="*", metavar="MODEL", help="time these models alone")
    parser.add_argument("--again", action="store_true", help="time anew what has a row")
    return parser.parse_args()


def threads_of(columns: Mapping[str, Any], ranks: int) -> int:
    """Threads that each rank computes in: `dsplan run` shares the cores out."""
    return max(1, int(columns["cores"]) // ranks)


def measure(groups: Iterable[Sequence[Case]], machine: Place, path: Path, effort: Effort, *, again: bool) -> None:
    """Time the groups that lack a row (or `again` all of them) and write the rows of each as it is done."""
    runs = {run.key: run for run in read_time_runs(path)}
    with Pools(machine) as pools:
        for group in groups:
            turns = [_turn(case, machine) for case in group]
            waiting = [turn for turn in turns if again or turn.run.key not in runs]
            if not waiting or time.monotonic() > effort.deadline:
                continue
            for turn in waiting * effort.rounds:
                _take(turn, pools, effort.steps)
            rows = [_row(turn, effort.rounds) for turn in waiting]
            runs |= {row.key: row for row in rows}
            write_time_runs(path, runs.values())
            print("\n".join(_line(row) for row in rows), flush=True)


class Pools:
    """Ranks for torch's strategies and ranks for DeepSpeed, which leaves state behind in its own; one world size."""

    def __init__(self, machine: Place) -> None:
        self.machine = machine
        self._pools: dict[bool, RankPool] = {}

    def run(self, case: Case, subject: Subject, steps: int, threads: int) -> list[Any]:
        """Return what `time_subject` returns on every rank.

        Raises:
            RankError: a rank failed; the next run starts new ones.
        """
        if any(pool.world_size != case.world_size for pool in self._pools.values()):
            self.close()
        kind = case.strategy in ZERO_STAGES
        if kind not in self._pools:
            # Every rank takes the first GPU, or none.
            on_gpu = self.machine.is_gpu
            variables = {"LOCAL_RANK": "0"} if on_gpu else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
            self._pools[kind] = RankPool(case.world_size, timeout_seconds=RUN_SECONDS, variables=variables)
        return self._pools[kind].run(time_subject, subject, steps, threads)

    def close(self) -> None:
        """End the ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _turn(case: Case, machine: Place) -> Turn:
    """Return a case as the row it will become and the plan that the engine runs."""
    columns: dict[str, Any] = {
        **machine.columns,
        "model": case.model,
        "config": json.dumps(case.model_config),
        "ranks_per_device": case.world_size if machine.is_gpu else 1,
        "memory_limit_bytes": 0,
        "threads": threads_of(machine.columns, case.world_size),
    }
    request, configuration = question(case, str(columns["device"]))
    row = TimeRun(**columns, **asdict(configuration), task=request.workload.task, outcome="failed")
    return Turn(case=case, run=row, plan=estimate(request, configuration))


def _take(turn: Turn, pools: Pools, steps: int) -> None:
    """One start of a run; one that failed has no other."""
    if turn.problem:
        return
    subject = Subject(config=turn.case.model_config, task=cast("Task", turn.run.task), plan=plan_to_dict(turn.plan))
    try:
        turn.steps += mean_over_ranks(pools.run(turn.case, subject, steps, turn.run.threads))
    except RankError as problem:
        turn.problem = str(problem)
        print(turn.problem[:3000], file=sys.stderr)


def _row(turn: Turn, rounds: int) -> TimeRun:
    if turn.problem:
        return replace(turn.run, outcome="out_of_memory" if "out of memory" in turn.problem else "failed")
    seconds = sorted(step.step for step in turn.steps)
    return replace(
        turn.run,
        outcome="completed",
        rounds=rounds,
        steps=len(seconds),
        step_seconds=_rounded(statistics.median(seconds)),
        fastest_seconds=_rounded(seconds[len(seconds) // 10]),
        slowest_seconds=_rounded(seconds[-1 - len(seconds) // 10]),
        forward_seconds=_rounded(statistics.median(step.forward for step in turn.steps)),
        backward_seconds=_rounded(statistics.median(step.backward for step in turn.steps)),
        optimizer_seconds=_rounded(statistics.median(step.optimizer for step in turn.steps)),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _line(run: TimeRun) -> str:
    how = [run.precision, run.optimizer, f"b{run.micro_batch_size}x{run.gradient_accumulation_steps}"]
    how += [f"l{run.sequence_length}"]
    how += [word for word in (run.activation_checkpointing, run.offload) if word != "none"]
    name = f"{run.model:11} {run.strategy:7} x{run.world_size} {' '.join(how):30}"
    if run.outcome != "completed":
        return f"{name} {run.outcome}"
    parts = " + ".join(f"{part:.3f}" for part in (run.forward_seconds, run.backward_seconds, run.optimizer_seconds))
    return f"{name} {run.step_seconds:7.3f} s = {parts}  spread {100 * run.spread:3.0f} %"


if __name__ == "__main__":
    main()
