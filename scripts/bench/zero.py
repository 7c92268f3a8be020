"""Our own ZeRO against DeepSpeed and FSDP2 on the same work: seconds of a step and live bytes of a rank.

    python -m scripts.bench.zero --minutes 18         # time every setting by turns until the time is up
    python -m scripts.bench.zero --models gpt2-14m    # some models alone
    python -m scripts.bench.zero --bytes --ranks 4    # live bytes instead of seconds
    python -m scripts.bench.zero --device cuda        # one GPU: scripts/bench/zero_cuda.py
    python -m scripts.report.zero_report               # docs/reference/benchmarks.md from the rows

Ranks over gloo, one thread each where there are two cores. The engines of a setting take turns, so that a machine that
is slow for a while is slow to all of them; a ratio is one of medians over all turns. Torch's AdamW, real text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import psutil

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.measured_rows import SHIPPED
from hardware_db.probe import probe
from hardware_db.probe.cgroup import usable_cores
from hardware_db.units import GIB
from planner.search.estimate import estimate
from planner.types.plan_io import plan_to_dict
from scripts.measure.machines import columns_of
from scripts.measure.measured_run import Subject, TimedStep, mean_over_ranks, measure_subject, time_subject
from scripts.measure.memory_grid import Case
from scripts.measure.memory_rows import question
from scripts.measure.zero_rows import ENGINES, LENGTH, SIZES, Engine, Row, Setting, write

_ENOUGH_BYTES = 10 * GIB
"""Of free memory, for the largest setting."""


def main() -> None:
    """Time the engines in turns and write their rows."""
    arguments = _arguments()
    if arguments.device == "cuda":
        from scripts.bench import zero_cuda

        zero_cuda.main()
        return
    chosen = product(arguments.models, arguments.precisions, arguments.accumulations)
    settings = [
        Setting(model=model, precision=precision, accumulation=steps, ranks=arguments.ranks)
        for model, precision, steps in chosen
    ]
    engines = [engine for engine in ENGINES if not arguments.only or "-".join(engine) in arguments.only]
    here = columns_of(probe())
    with Pools(arguments.ranks) as pools:
        for rows in (_bytes if arguments.bytes else _times)(pools, settings, engines, arguments):
            print(*(row.line for row in rows), sep="\n", flush=True)
            if not arguments.dry:
                write(arguments.out, [replace(row, **here) for row in rows])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--accumulations", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--only", nargs="*", metavar="STRATEGY-BACKEND", help="these engines alone")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each turn; half of several micro-batches")
    parser.add_argument("--turns", type=int, default=100, help="turns of each setting at most")
    parser.add_argument("--minutes", type=float, default=18.0, help="no turn begins that would not end by then")
    parser.add_argument("--bytes", action="store_true", help="measure live bytes, not seconds")
    parser.add_argument("--dry", action="store_true", help="print, write no rows")
    parser.add_argument("--out", type=Path, default=SHIPPED / "zero_cpu.csv")
    return parser.parse_args()


class Pools:
    """Ranks for torch and ours, and ranks for DeepSpeed, which leaves state behind in its own."""

    def __init__(self, ranks: int) -> None:
        variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        self._pools = {kind: RankPool(ranks, timeout_seconds=600, variables=variables) for kind in (False, True)}

    def run(self, backend: str, function: Any, *arguments: Any) -> list[Any]:
        """Run a function on the ranks of a backend."""
        return self._pools[backend == "deepspeed"].run(function, *arguments)

    def renew(self) -> None:
        """End the ranks with what they hold of earlier runs; the next run starts others."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exception: object) -> None:
        self.renew()


def subject_of(setting: Setting, strategy: str, backend: str) -> Subject:
    """Return the run that an engine is given for a setting."""
    case = Case(
        model=setting.model,
        config=SIZES[setting.model],
        strategy=strategy,  # type: ignore[arg-type]
        world_size=setting.ranks,
        micro_batch=1,
        length=LENGTH[setting.model],
        accumulation=setting.accumulation,
        precision=setting.precision,  # type: ignore[arg-type]
    )
    request, configuration = question(case, "cpu")
    plan = estimate(request, replace(configuration, backend=backend))  # type: ignore[arg-type]
    return Subject(config=case.model_config, task="causal-lm", plan=plan_to_dict(plan))


def _times(
    pools: Pools, settings: Sequence[Setting], engines: Sequence[Engine], arguments: argparse.Namespace
) -> Iterator[list[Row]]:
    """Yield the rows of a setting after each of its turns; the first turn is taken whatever time there is."""
    timed: dict[tuple[Setting, Engine], list[TimedStep]] = {}
    longest: dict[Setting, float] = {}
    threads = max(1, usable_cores() // arguments.ranks)
    ends = time.perf_counter() + 60 * arguments.minutes
    for turn in count():
        fitting = [
            candidate for candidate in settings if time.perf_counter() + longest.get(candidate, 0.0) < ends or turn == 0
        ]
        if turn == arguments.turns or not fitting:
            return
        for setting in fitting:
            began = time.perf_counter()
            if turn and began + longest[setting] > ends:
                continue
            steps = arguments.steps if setting.accumulation == 1 else max(2, arguments.steps // 2)
            for engine in engines if turn % 2 == 0 else reversed(engines):
                ranks = pools.run(engine[1], time_subject, subject_of(setting, *engine), steps, threads)
                timed.setdefault((setting, engine), []).extend(mean_over_ranks(ranks))
            if psutil.virtual_memory().available < _ENOUGH_BYTES:
                pools.renew()
            longest[setting] = max(longest.get(setting, 0.0), time.perf_counter() - began)
            yield [_timed_row(setting, engine, turn + 1, timed[setting, engine]) for engine in engines]


def _timed_row(setting: Setting, engine: Engine, turns: int, steps: Sequence[TimedStep]) -> Row:
    seconds = sorted(step.step for step in steps)
    parts = {
        f"{name}_seconds": round(statistics.median(getattr(step, name) for step in steps), 5)
        for name in ("forward", "backward", "optimizer")
    }
    return Row(
        **asdict(setting),
        strategy=engine[0],
        backend=engine[1],
        turns=turns,
        steps=len(steps),
        step_seconds=round(statistics.median(seconds), 5),
        fastest_seconds=round(seconds[0], 5),
        slowest_seconds=round(seconds[-1], 5),
        **parts,
    )


def _bytes(
    pools: Pools, settings: Sequence[Setting], engines: Sequence[Engine], arguments: argparse.Namespace
) -> Iterator[list[Row]]:
    for setting in settings:
        for strategy, backend in engines:
            ranks = pools.run(backend, measure_subject, subject_of(setting, strategy, backend))
            pools.renew()
            busiest = max(ranks, key=lambda rank: rank.peak_bytes)
            yield [
                Row(
                    **asdict(setting),
                    strategy=strategy,
                    backend=backend,
                    resident_bytes=busiest.resident_bytes,
                    states_bytes=busiest.states_bytes,
                    peak_bytes=busiest.peak_bytes,
                    peak_phase=max(busiest.phases, key=lambda name: busiest.phases[name]),
                )
            ]


if __name__ == "__main__":
    main()
