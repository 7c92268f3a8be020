"""How far off the nearest memory form is where a model's own structure was never traced.

    python scripts/nearest_forms.py

Every traced case is predicted with the forms of its structure left out, as a model from outside the catalogue would be,
and compared with its trace. `planner.memory.overhead.NEAREST_FORM_ERROR` is read off the result.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_cases import Case, all_cases, traced_peak

from planner.memory import figures, form_files, memory_estimate, moments
from planner.memory.structure import structure_of


def left_out() -> Iterator[float]:
    """Signed errors of the peak; a case whose kind of model has no other form at all is skipped."""
    for case in all_cases():
        if case.truth == "traced":
            try:
                yield _error(case)
            except LookupError:
                continue


def _error(case: Case) -> float:
    files: Any = form_files
    known, own = files._file, structure_of(case.job.facts)
    files._file = lambda model_type: [entry for entry in known(model_type) if entry["structure"] != own]
    _forget()
    try:
        return traced_peak(memory_estimate(case.job), case.job) / case.measured - 1
    finally:
        files._file = known
        _forget()


def _forget() -> None:
    figures._catalogued.cache_clear()
    moments._instants.cache_clear()
    moments._CACHE.clear()


def main() -> None:
    errors = sorted(left_out())
    below = -errors[len(errors) // 20]
    median = statistics.median(map(abs, errors))
    print(f"{len(errors)} cases: median {median:.1%}; one in twenty is {below:.1%} under or more, one {-errors[0]:.0%}")


if __name__ == "__main__":
    main()
