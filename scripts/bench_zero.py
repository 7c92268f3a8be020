"""Our own ZeRO against DeepSpeed and FSDP2 on the same work: seconds of a step and live bytes of a rank.

    python scripts/bench_zero.py                      # time every setting, into hardware_db/measurements/zero_cpu.csv
    python scripts/bench_zero.py --models gpt2-14m    # some models alone
    python scripts/bench_zero.py --bytes              # live bytes instead of seconds
    python scripts/bench_zero.py --table              # print the tables of docs/benchmarks.md from the rows

Two ranks over gloo, one thread each where there are two cores. The engines of a setting take turns, so that a machine
that is slow for a while is slow to all of them; a ratio is one of medians over all turns. Torch's AdamW, real text.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memory_grid import Case
from memory_rows import question
from time_grid import MODELS

from hardware_db.run_rows import SHIPPED
from hardware_db.spawn import RankPool
from planner.estimate import estimate
from planner.plan_io import plan_to_dict
from strategies.measure_times import TimedStep, mean_over_ranks
from strategies.measured_run import Subject, measure_subject, time_subject

RANKS = 2
SIZES: Mapping[str, Mapping[str, Any]] = {
    "gpt2-14m": MODELS["gpt2-14m"],
    "gpt2-101m": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 20480, "n_positions": 512},
}
LENGTH = {"gpt2-14m": 128, "gpt2-101m": 64}
ENGINES: tuple[tuple[str, str], ...] = (
    *(("zero1", "deepspeed"), ("zero1", "native"), ("zero2", "deepspeed"), ("zero2", "native")),
    *(("zero3", "deepspeed"), ("zero3", "native"), ("fsdp", "torch")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What every engine is asked to train."""

    model: str
    precision: str
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine in one setting: seconds are medians over `steps` timed steps in `turns` turns, bytes a rank's peak."""

    model: str
    precision: str
    accumulation: int
    strategy: str
    backend: str
    ranks: int = RANKS
    turns: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    fastest_seconds: float = 0.0
    slowest_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    peak_phase: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return self.model, self.precision, self.accumulation, self.strategy, self.backend


def main() -> None:
    arguments = _arguments()
    if arguments.table:
        print("\n".join(tables(read(arguments.out))))
        return
    chosen = product(arguments.models, arguments.precisions, arguments.accumulations)
    settings = [Setting(model=model, precision=precision, accumulation=steps) for model, precision, steps in chosen]
    engines = [engine for engine in ENGINES if not arguments.only or "-".join(engine) in arguments.only]
    with Pools() as pools:
        for setting in settings:
            rows = list((_bytes if arguments.bytes else _times)(pools, setting, engines, arguments))
            if not arguments.dry:
                write(arguments.out, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--accumulations", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--only", nargs="*", metavar="STRATEGY-BACKEND", help="these engines alone")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each turn")
    parser.add_argument("--bytes", action="store_true", help="measure live bytes, not seconds")
    parser.add_argument("--table", action="store_true", help="print the tables of the rows there are")
    parser.add_argument("--dry", action="store_true", help="print, write no rows")
    parser.add_argument("--out", type=Path, default=SHIPPED / "zero_cpu.csv")
    return parser.parse_args()


class Pools:
    """Ranks for torch and ours, and ranks for DeepSpeed, which leaves state behind in its own."""

    def __init__(self) -> None:
        variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        self._pools = {kind: RankPool(RANKS, timeout_seconds=600, variables=variables) for kind in (False, True)}

    def run(self, backend: str, function: Any, *arguments: Any) -> list[Any]:
        return self._pools[backend == "deepspeed"].run(function, *arguments)

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools.values():
            pool.close()


def _subject(setting: Setting, strategy: str, backend: str) -> Subject:
    case = Case(
        model=setting.model,
        config=SIZES[setting.model],
        strategy=strategy,  # type: ignore[arg-type]
        world_size=RANKS,
        micro_batch=1,
        length=LENGTH[setting.model],
        accumulation=setting.accumulation,
        precision=setting.precision,  # type: ignore[arg-type]
    )
    request, configuration = question(case, "cpu")
    plan = estimate(request, replace(configuration, backend=backend))  # type: ignore[arg-type]
    return Subject(config=case.model_config, task="causal-lm", plan=plan_to_dict(plan))


def _times(
    pools: Pools, setting: Setting, engines: Sequence[tuple[str, str]], arguments: argparse.Namespace
) -> Iterator[Row]:
    timed: dict[tuple[str, str], list[TimedStep]] = {engine: [] for engine in engines}
    threads = max(1, (os.cpu_count() or 1) // RANKS)
    for turn in range(arguments.turns):
        for engine in engines if turn % 2 == 0 else reversed(engines):
            subject = _subject(setting, *engine)
            ranks = pools.run(engine[1], time_subject, subject, arguments.steps, threads)
            timed[engine] += mean_over_ranks(ranks)
    for (strategy, backend), steps in timed.items():
        seconds = sorted(step.step for step in steps)
        parts = {
            f"{name}_seconds": round(statistics.median(getattr(step, name) for step in steps), 5)
            for name in ("forward", "backward", "optimizer")
        }
        row = Row(
            **asdict(setting),
            strategy=strategy,
            backend=backend,
            turns=arguments.turns,
            steps=len(steps),
            step_seconds=round(statistics.median(seconds), 5),
            fastest_seconds=round(seconds[0], 5),
            slowest_seconds=round(seconds[-1], 5),
            **parts,
        )
        print(_line(row), flush=True)
        yield row


def _bytes(
    pools: Pools, setting: Setting, engines: Sequence[tuple[str, str]], arguments: argparse.Namespace
) -> Iterator[Row]:
    for strategy, backend in engines:
        ranks = pools.run(backend, measure_subject, _subject(setting, strategy, backend))
        busiest = max(ranks, key=lambda rank: rank.peak_bytes)
        phase = max(busiest.phases, key=lambda name: busiest.phases[name])
        row = Row(
            **asdict(setting),
            strategy=strategy,
            backend=backend,
            resident_bytes=busiest.resident_bytes,
            peak_bytes=busiest.peak_bytes,
            peak_phase=phase,
        )
        print(_line(row), dict(busiest.phases), flush=True)
        yield row


def _line(row: Row) -> str:
    name = f"{row.model:10} {row.precision} x{row.accumulation} {row.strategy:6} {row.backend:10}"
    if row.peak_bytes:
        megabytes = f"resident {row.resident_bytes / 1e6:8.1f} MB  peak {row.peak_bytes / 1e6:8.1f} MB"
        return f"{name} {megabytes} ({row.peak_phase})"
    parts = f"{row.forward_seconds:.3f} + {row.backward_seconds:.3f} + {row.optimizer_seconds:.3f}"
    return f"{name} {row.step_seconds:7.3f} s = {parts}  ({row.fastest_seconds:.3f} to {row.slowest_seconds:.3f})"


def tables(rows: Mapping[tuple[object, ...], Row]) -> Iterator[str]:
    """Markdown: every setting's seconds, ours over DeepSpeed's and FSDP2's, and the medians over the settings."""
    settings = list(dict.fromkeys((row.model, row.precision, row.accumulation) for row in rows.values()))
    pairs = [(stage, f"{stage} / DeepSpeed", (stage, "deepspeed")) for stage in ("zero1", "zero2", "zero3")]
    pairs.append(("zero3", "zero3 / FSDP2", ("fsdp", "torch")))
    ratios: dict[str, list[float]] = {title: [] for _, title, _ in pairs}
    yield "| model | precision | accumulation | " + " | ".join(title for _, title, _ in pairs) + " |"
    yield "|---|---|---|" + "---|" * len(pairs)
    for setting in settings:
        cells = []
        for stage, title, other in pairs:
            ours, theirs = rows.get((*setting, stage, "native")), rows.get((*setting, *other))
            if ours is None or theirs is None or not ours.step_seconds or not theirs.step_seconds:
                cells.append("-")
                continue
            ratios[title].append(ours.step_seconds / theirs.step_seconds)
            cells.append(f"{ours.step_seconds:.3f} / {theirs.step_seconds:.3f} s = {ratios[title][-1]:.2f}")
        yield "| " + " | ".join([*map(str, setting), *cells]) + " |"
    for name, choose in (("median", statistics.median), ("largest", max)):
        yield f"| **{name}** | | | " + " | ".join(f"**{choose(found):.2f}**" for found in ratios.values()) + " |"


def read(path: Path) -> dict[tuple[object, ...], Row]:
    """The rows of a file by their key."""
    if not path.is_file():
        return {}
    kinds = {item.name: {"int": int, "float": float, "str": str}[str(item.type)] for item in fields(Row)}
    with open(path, newline="") as file:
        rows = [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in csv.DictReader(file)]
    return {row.key: row for row in rows}


def write(path: Path, measured: Sequence[Row]) -> None:
    """Add rows to a file; what a row does not measure is kept from the one it replaces."""
    for row in measured:
        rows = read(path)
        before = rows.get(row.key)
        kept = {name: value for name, value in asdict(before).items() if not getattr(row, name)} if before else {}
        rows[row.key] = replace(row, **kept)
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, [item.name for item in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in rows.values())
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
