"""Prints how far step times on real CPU ranks are from their predictions, and which strategy is named fastest.

    python scripts/check_times.py                                   # the shipped rows
    python scripts/check_times.py --times FILE --rates FILE --bench FILE

Predictions use what `dsplan bench` measured on the machine before: its rates (rates_cpu.csv), and the factors that its
short training runs (times_bench_cpu.csv) ask for. None of the rows that are compared was learnt from.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rate_rows import RATES, read_rates
from real_times import (
    BENCH_TIMES,
    TIMES,
    Bench,
    Contest,
    contests,
    learning,
    median_error,
    quick_bench,
)
from time_grid import STRATEGIES

from hardware_db.time_runs import TimeRun, read_time_runs


def main() -> None:
    arguments = _arguments()
    runs = [run for run in read_time_runs(arguments.times) if run.outcome == "completed"]
    rates, training = read_rates(arguments.rates), read_time_runs(arguments.bench)
    _print_contests(contests(runs, Bench(rates, training)))
    for name, bench in (("rates alone", Bench(rates)), ("rates and training runs", Bench(rates, training))):
        print(_summary(name, contests(runs, bench)))
    quick = quick_bench(rates)
    for model in dict.fromkeys(run.model for run in runs):
        print(_learning(quick, [run for run in runs if run.model == model]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=TIMES, help="measured steps")
    parser.add_argument("--rates", type=Path, default=RATES, help="what dsplan bench measured of the machine")
    parser.add_argument("--bench", type=Path, default=BENCH_TIMES, help="the training runs of dsplan bench")
    return parser.parse_args()


def _print_contests(found: Sequence[Contest]) -> None:
    for contest in found:
        verdict = "rightly" if contest.named_rightly else f"loses {contest.loss:.0%}"
        print(
            f"{contest.name}: {contest.chosen.run.strategy} named, {contest.fastest.run.strategy} fastest, {verdict};"
            f" order {contest.order:.2f}"
        )
        for entry in contest.entries:
            run = entry.run
            print(
                f"    {run.strategy:6} {run.step_seconds:6.3f} s (spread {run.spread:3.0%})"
                f"  predicted {entry.predicted_seconds:6.3f} s {entry.error:+5.0%}"
            )


def _summary(name: str, found: Sequence[Contest]) -> str:
    timed = [entry for contest in found for entry in contest.entries]
    by_strategy = ", ".join(
        f"{strategy} {median_error(entry for entry in timed if entry.run.strategy == strategy):.1%}"
        for strategy in STRATEGIES
    )
    right = sum(contest.named_rightly for contest in found)
    return (
        f"{name}: median error {median_error(timed):.1%} over {len(timed)} runs ({by_strategy}); fastest named rightly"
        f" in {right} of {len(found)}, median rank correlation {statistics.median(c.order for c in found):.2f}"
    )


def _learning(bench: Bench, runs: Sequence[TimeRun]) -> str:
    """A user's ten runs of one batch, then ten of another."""
    found = learning(sorted(runs, key=lambda run: (run.micro_batch_size, run.sequence_length)), bench)
    return f"{found.model}: ten runs take the error on the next ten from {found.before:.1%} to {found.after:.1%}"


if __name__ == "__main__":
    main()
