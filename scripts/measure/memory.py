"""Measures the memory of whole training steps over a grid of configurations, with dsplan's engine on real ranks.

    python -m scripts.measure.memory                              # CPU ranks, hardware_db/measurements/memory_cpu.csv
    python -m scripts.measure.memory --device cuda --minutes 9    # the GPU of this machine, memory_<name>.csv
    python -m scripts.measure.memory --only zero2 --again         # some strategies, measured anew

Every run becomes a row as soon as it is done; runs that have a row are skipped, so that a broken-off measurement goes
on where it stopped. Ranks talk over gloo, and on a GPU all of them share the one card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.fingerprint import fingerprint
from hardware_db.measured_rows import SHIPPED, MemoryRun, read_memory_runs, write_memory_runs
from hardware_db.probe import Machine, probe
from hardware_db.probe.as_device import gpu_device
from hardware_db.units import MIB
from planner.search.estimate import estimate
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from planner.vocabulary import ZERO_STAGES, Task
from scripts.measure.gloo import quiet
from scripts.measure.machines import record
from scripts.measure.measured_run import StepMemory, Subject, device_used_bytes, measure_subject
from scripts.measure.memory_grid import CPU_GRID, Case, gpu_grid
from scripts.measure.memory_rows import compared, question

RUN_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A machine for runs: columns that all its rows share, and what its driver showed before any rank started."""

    columns: Mapping[str, Any]
    total_bytes: int = 0
    used_bytes: int = 0

    @property
    def is_gpu(self) -> bool:
        """True if the run is on a GPU."""
        return bool(self.columns["device"] != "cpu")


def main() -> None:
    """Measure the grid and write its rows."""
    arguments = _arguments()
    machine = place_of(probe(), arguments.device)
    path = arguments.out or SHIPPED / f"memory_{machine.columns['device'].split('-')[0].lower()}.csv"
    grid = gpu_grid(machine.total_bytes) if machine.is_gpu else CPU_GRID
    wanted = [case for case in grid if not arguments.only or case.strategy in arguments.only]
    measure(wanted, machine, path, again=arguments.again, deadline=time.monotonic() + 60 * arguments.minutes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run after this many minutes")
    parser.add_argument("--out", type=Path, help="the CSV file to add to")
    parser.add_argument("--only", nargs="*", metavar="STRATEGY", help="measure these strategies alone")
    parser.add_argument("--again", action="store_true", help="measure anew what has a row")
    return parser.parse_args()


def place_of(machine: Machine, device: str) -> Place:
    """Return the columns of runs here, and record the machine that they name."""
    versions = fingerprint(machine).versions
    columns = record(machine) | {name: getattr(versions, name) for name in ("torch", "transformers", "deepspeed")}
    if device == "cpu":
        return Place(columns={**columns, "device": "cpu", "driver": ""})
    if not machine.usable_gpus:
        raise SystemExit("measure_memory: this machine shows no GPU; leave --device out to measure on CPU ranks")
    gpu = machine.usable_gpus[0]
    columns |= {"device": gpu_device(gpu).name, "driver": machine.software.driver or ""}
    total = gpu.total_bytes or 0
    return Place(columns=columns, total_bytes=total, used_bytes=total - (gpu.free_bytes or 0))


def measure(cases: Iterable[Case], machine: Place, path: Path, *, again: bool, deadline: float) -> None:
    """Measure the cases that have no row yet (or `again` those that have) and write a row for each as it is done."""
    runs = {run.key: run for run in read_memory_runs(path)}
    with Ranks(machine) as ranks:
        for case in sorted(cases, key=Ranks.kind) if not machine.is_gpu else cases:
            row, plan = _plan_case(case, machine)
            if (row.key in runs and not again) or time.monotonic() > deadline:
                continue
            runs[row.key] = measured = _measured(case, row, plan, ranks)
            write_memory_runs(path, runs.values())
            print(_line(measured), flush=True)


class Ranks:
    """One pool of ranks at a time, kept as long as the next case can use it."""

    def __init__(self, machine: Place) -> None:
        self.machine = machine
        self.context_bytes = 0
        self._pool: RankPool | None = None
        self._kind: tuple[bool, int] = (False, 0)

    @staticmethod
    def kind(case: Case) -> tuple[bool, int]:
        """Cases of one kind can use the same processes: DeepSpeed leaves state behind in its own."""
        return case.strategy in ZERO_STAGES, case.world_size

    def run(self, case: Case, subject: Subject) -> list[StepMemory]:
        """Return what every rank measured.

        Raises:
            RankError: a rank failed; the next run starts new ones.
        """
        if self._pool is None or self._kind != self.kind(case):
            self._start(case)
        pool = cast("RankPool", self._pool)
        try:
            return cast("list[StepMemory]", pool.run(measure_subject, subject))
        except RankError:
            self.close()
            raise

    def _start(self, case: Case) -> None:
        self.close()
        self._kind = self.kind(case)
        # Every rank takes the first GPU, or none.
        variables = (
            {"LOCAL_RANK": "0"} if self.machine.is_gpu else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        )
        self._pool = RankPool(case.world_size, timeout_seconds=RUN_SECONDS, variables=variables)
        if not self.machine.is_gpu:
            quiet(self._pool)
        else:
            self._pool.run(device_used_bytes)
            used = max(self._pool.run(device_used_bytes))  # now that every rank is there
            self.context_bytes = max(used - self.machine.used_bytes, 0) // case.world_size

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _plan_case(case: Case, machine: Place) -> tuple[MemoryRun, Plan]:
    """Return the row of a case with nothing measured, and the plan that its engine runs."""
    columns: dict[str, Any] = {
        **machine.columns,
        "model": case.model,
        "config": json.dumps(case.model_config),
        "ranks_per_device": case.world_size if machine.is_gpu else 1,
        "memory_limit_bytes": round(case.memory_fraction * machine.total_bytes) if case.memory_fraction < 1 else 0,
    }
    request, configuration = question(case, str(columns["device"]))
    row = MemoryRun(**columns, **asdict(configuration), task=request.workload.task, outcome="failed")
    return row, estimate(request, configuration)


def _measured(case: Case, row: MemoryRun, plan: Plan, ranks: Ranks) -> MemoryRun:
    subject = Subject(
        config=case.model_config,
        task=cast("Task", row.task),
        plan=plan_to_dict(plan),
        memory_fraction=case.memory_fraction,
    )
    try:
        steps = ranks.run(case, subject)
    except RankError as problem:
        print(str(problem)[:3000], file=sys.stderr)
        return replace(row, outcome="out_of_memory" if "out of memory" in str(problem) else "failed")
    busiest = max(steps, key=lambda rank: rank.peak_bytes)
    used = max(rank.device_used_bytes for rank in steps)
    return replace(
        row,
        outcome="completed",
        resident_bytes=busiest.resident_bytes,
        peak_allocated_bytes=busiest.peak_bytes,
        peak_reserved_bytes=max(rank.reserved_bytes for rank in steps),
        device_used_bytes=max(used - ranks.machine.used_bytes, 0) // len(steps),
        context_bytes=ranks.context_bytes,
        host_bytes=sum(rank.host_bytes for rank in steps),
        forward_bytes=busiest.phases["forward"],
        loss_bytes=busiest.phases["loss"],
        backward_bytes=busiest.phases["backward"],
        step_bytes=busiest.phases["step"],
    )


def _line(run: MemoryRun) -> str:
    how = [run.precision, run.optimizer, f"b{run.micro_batch_size}x{run.gradient_accumulation_steps}"]
    how += [word for word in (run.activation_checkpointing, run.offload) if word != "none"]
    name = f"{run.model:24} {run.strategy:13} x{run.world_size} {' '.join(how):40}"
    if run.outcome != "completed":
        return f"{name} {run.outcome}"
    errors_of_run = compared(run)
    errors = "  ".join(f"{phase} {100 * errors_of_run.error(phase):+5.1f} %" for phase in run.phases)
    return f"{name} {run.peak_allocated_bytes / MIB:9.1f} MiB  peak {100 * errors_of_run.error():+5.1f} %  {errors}"


if __name__ == "__main__":
    main()
