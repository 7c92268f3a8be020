"""Prints how far measured step times are from their predictions, and which strategy is named fastest.

    python -m scripts.report.check_times                       # real CPU ranks
    python -m scripts.report.check_times --device H200-SXM5    # plans of one GPU, where such rows were measured

Predictions use what `dsplan bench` measured on the machine before: its rates, and the factors that its short training
runs ask for. None of the rows that are compared was learnt from.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence

from hardware_db.measured_rows import TimeRun, read_time_runs
from scripts.fit.time_scores import percentile
from scripts.measure.rate_rows import read_rates
from scripts.measure.real_times import (
    Bench,
    Contest,
    Learning,
    Timed,
    by_batch,
    contests,
    files_of,
    learning,
    median_error,
)
from scripts.measure.time_grid import STRATEGIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="whose rows: cpu, or a GPU of the catalogue")
    files = files_of(parser.parse_args().device)
    runs = [run for run in read_time_runs(files.times) if run.outcome == "completed"]
    rates = read_rates(files.rates)
    plain, calibrated = Bench(rates), Bench(rates, read_time_runs(files.training))
    compare = _ranks if runs[0].device == "cpu" else _gpu
    for line in compare(runs, plain, calibrated):
        print(line)
    for own in by_batch(runs).values():
        print(_learning(learning(own, rates), len(own) // 2))


def _ranks(runs: Sequence[TimeRun], plain: Bench, calibrated: Bench) -> Iterable[str]:
    for contest in contests(runs, calibrated):
        verdict = "rightly" if contest.named_rightly else f"loses {contest.loss:.0%}"
        named, fastest = contest.chosen.run.strategy, contest.fastest.run.strategy
        yield f"{contest.name}: {named} named, {fastest} fastest, {verdict}; order {contest.order:.2f}"
        yield from map(_row, contest.entries)
    for name, bench in (("rates alone", plain), ("calibrated", calibrated)):
        yield f"{name}: {_summary(contests(runs, bench))}"


def _gpu(runs: Sequence[TimeRun], plain: Bench, calibrated: Bench) -> Iterable[str]:
    yield from map(_row, map(calibrated.timed, runs))
    for name, bench in (("rates alone", plain), ("calibrated", calibrated)):
        timed = [bench.timed(run) for run in runs]
        offloaded = [prediction for prediction in timed if prediction.run.offload != "none"]
        for what, part in (("all", timed), ("offload", offloaded)):
            p90 = percentile((abs(prediction.error) for prediction in part), 0.9)
            yield f"{name}, {what}: median error {median_error(part):.1%}, 90th percentile {p90:.1%}, {len(part)} runs"


def _row(timed: Timed) -> str:
    run = timed.run
    how = f"{run.strategy} {run.precision} {run.optimizer} {run.activation_checkpointing} {run.offload}"
    return (
        f"    {run.model:12} {how:36} {run.step_seconds:7.3f} s (spread {run.spread:4.0%})"
        f"  predicted {timed.predicted_seconds:7.3f} s {timed.error:+5.0%}"
    )


def _summary(listed: Sequence[Contest]) -> str:
    timed = [entry for contest in listed for entry in contest.entries]
    by_strategy = ", ".join(
        f"{strategy} {median_error(entry for entry in timed if entry.run.strategy == strategy):.1%}"
        for strategy in STRATEGIES
    )
    right = sum(contest.named_rightly for contest in listed)
    return (
        f"median error {median_error(timed):.1%} over {len(timed)} runs ({by_strategy}); fastest named rightly in"
        f" {right} of {len(listed)}, median rank correlation {statistics.median(c.order for c in listed):.2f}"
    )


def _learning(learnt: Learning, half: int) -> str:
    """A user's runs of one batch, then as many of another."""
    return (
        f"{learnt.model}: {half} runs take the error on the next {half} from {learnt.before:.1%} ({learnt.measured:.1%}"
        f" with the first run's rates) to {learnt.after:.1%}"
    )


if __name__ == "__main__":
    main()
