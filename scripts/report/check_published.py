"""Prints how far the shipped time model is from published training runs, by source, and how well it orders plans.

    python -m scripts.report.check_published

The shipped constants are fitted to stated rows among these: for errors on rows that no constant has seen, see
`scripts/fit/time_accuracy.py`. Groups that share everything but the plan are ranked by Spearman's correlation of
predicted and measured speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from planner.cost.timing import step_time
from scripts.fit.published_rows import PublishedRun, published_runs
from scripts.fit.time_scores import Scored, choices, errors


def scored(runs: Iterable[PublishedRun]) -> list[Scored]:
    """Runs with what the shipped model says of them."""
    return [Scored(run=run, predicted_seconds=step_time(run.job).step_seconds) for run in runs]


def report(rows: Sequence[Scored]) -> Iterator[str]:
    """A line per source: runs, median and 90th percentile of the error, bias, rank correlation."""
    yield f"{'source':40} {'runs':>4} {'median':>7} {'p90':>7} {'bias':>7}  rank correlation within groups"
    for source, reading in dict.fromkeys((row.run.source, row.run.reading) for row in rows):
        own = [row for row in rows if (row.run.source, row.run.reading) == (source, reading)]
        of = errors(own)
        correlations = [choice.correlation for choice in choices(own) if choice.correlation is not None]
        order = (
            f"median {statistics.median(correlations):.2f} of {len(correlations)}, lowest {min(correlations):.2f}"
            if correlations
            else "-"
        )
        yield f"{f'{source} ({reading})':40} {of.runs:4} {of.median:7.1%} {of.p90:7.1%} {of.bias:+7.1%}  {order}"


if __name__ == "__main__":
    print("\n".join(report(scored(published_runs()))))
