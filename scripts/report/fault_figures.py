"""The table of docs/explanation/surviving.md from the figures that the fault suite keeps: `fault_figures.py FILE`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADINGS = (
    "fault",
    "strategies",
    "faults in runs",
    "after the third checkpoint",
    "reached the last step",
    "worst difference of a step's loss",
    "steps made again, median and most",
)
Runs = Sequence[dict[str, Any]]


def row(fault: str, runs: Runs) -> tuple[str, ...]:
    """Return what the runs with one kind of fault came to."""
    finished = [run for run in runs if run["finished"]]
    repeated = [steps for run in runs for steps in run["steps_repeated"]]
    worst = max((run["worst_difference"] for run in finished), default=float("nan"))
    return (
        fault,
        str(len({run["strategy"] for run in runs})),
        f"{_sum(runs, 'hits')} in {len(runs)}",
        f"{_sum(runs, 'late')} of {_sum(runs, 'hits')}",
        f"{len(finished)} of {len(runs)}",
        f"{worst:.1g}",
        f"{statistics.median(repeated):.0f}, {max(repeated)}" if repeated else "-",
    )


def _sum(runs: Runs, name: str) -> int:
    return sum(run[name] for run in runs)


def main(path: str) -> int:
    runs = [json.loads(line) for line in Path(path).read_text().splitlines()]
    faults = sorted({run["fault"] for run in runs}, key=str.lower)
    table = [row(fault, [run for run in runs if run["fault"] == fault]) for fault in faults]
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *table, row("all", runs)):
        print("| " + " | ".join(cells) + " |")
    lost = [seconds for run in runs for seconds in run["seconds_lost"]]
    if lost:
        print(
            f"\nSeconds from the last step before a fault to a new one: {statistics.median(lost):.1f}, {max(lost):.1f}"
        )
    print(f"Samples misused: {_sum(runs, 'misused_samples')}; processes left: {_left(runs)}")
    print("Strategies: " + ", ".join(sorted({run["strategy"] for run in runs})))
    return 0


def _left(runs: Runs) -> int:
    return sum(len(run["left_running"]) for run in runs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
