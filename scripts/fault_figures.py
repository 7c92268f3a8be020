"""The table of docs/surviving.md from the figures that the fault suite keeps: `fault_figures.py FILE`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADINGS = (
    "fault",
    "runs",
    "faults",
    "finished",
    "worst loss difference",
    "samples misused",
    "left running",
    "steps repeated, median and most",
    "seconds lost, median and most",
)


def row(fault: str, runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What the runs with one kind of fault came to."""
    finished = [run for run in runs if run["finished"]]
    lost = [seconds for run in runs for seconds in run["seconds_lost"]]
    repeated = [steps for run in runs for steps in run["steps_repeated"]]
    return (
        fault,
        str(len(runs)),
        str(sum(run["hits"] for run in runs)),
        str(len(finished)),
        f"{max((run['worst_difference'] for run in finished), default=float('nan')):.2g}",
        str(sum(run["misused_samples"] for run in runs)),
        str(sum(len(run["left_running"]) for run in runs)),
        f"{statistics.median(repeated):.0f}, {max(repeated)}" if repeated else "-",
        f"{statistics.median(lost):.1f}, {max(lost):.1f}" if lost else "-",
    )


def main(path: str) -> int:
    runs = [json.loads(line) for line in Path(path).read_text().splitlines()]
    faults = list(dict.fromkeys(run["fault"] for run in runs))
    table = [row(fault, [run for run in runs if run["fault"] == fault]) for fault in faults]
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *table):
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
