"""How far published runs went over the memory that they are said to need, and how many of others a bound holds.

    python -m scripts.fit.memory_bound

Every publication that prints memory counts as much as another, however many runs it has. The bound over all of them is
`planner.cost.memory.overhead.BEYOND_NEED`; for the coverage each publication is left out in turn, and its runs are held
against the bound of the others. A run that stays below its bound is covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.cost.memory.overhead import FRAGMENTATION_UPPER, SEGMENT_BYTES
from planner.types.plan import MemoryEstimate
from scripts.fit.published_memory import published_runs

SHARE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Beyond:
    """One run: where it was published, whose code it ran, and what it took over what it is said to need."""

    source: str
    code: str
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Of one publication: its runs, how many stay below the bound of all others, and that bound."""

    source: str
    runs: int
    below: int
    bound: float


def needed_bytes(memory: MemoryEstimate, kind: str) -> float:
    """What is needed, without what a printed figure of this kind does not hold: the context and the communicators, and
    segments that are not full. A figure of unknown kind is taken for what nvidia-smi shows."""
    tensors = memory.peak_allocated_bytes * (1 + FRAGMENTATION_UPPER)
    return {"allocated": tensors, "reserved": tensors + SEGMENT_BYTES}.get(kind, memory.device_needed_bytes)


def measured() -> list[Beyond]:
    """Every published run that printed its memory."""
    found = []
    for run in published_runs():
        if run.memory_bytes:
            memory, _ = run.predicted()
            found.append(
                Beyond(
                    source=run.source,
                    code=run.request.workload.code,
                    ratio=run.memory_bytes / needed_bytes(memory, run.kind),
                )
            )
    return found


def bound(runs: Sequence[Beyond], share: float = SHARE) -> float:
    """The ratio that so large a share of the runs stays below, where every publication weighs the same."""
    counts = {run.source: sum(other.source == run.source for other in runs) for run in runs}
    passed = 0.0
    for run in sorted(runs, key=lambda run: run.ratio):
        passed += 1 / counts[run.source]
        if passed >= share * len(counts):
            return run.ratio
    return max(run.ratio for run in runs)


def left_out(runs: Sequence[Beyond]) -> list[Coverage]:
    """Each publication against the bound of the others."""
    found = []
    for source in dict.fromkeys(run.source for run in runs):
        own = [run.ratio for run in runs if run.source == source]
        limit = bound([run for run in runs if run.source != source])
        below = sum(ratio <= limit for ratio in own)
        found.append(Coverage(source=source, runs=len(own), below=below, bound=limit))
    return found


def covered(found: Iterable[Coverage]) -> tuple[int, int]:
    """Of all publications: the runs below the bound, and all runs."""
    every = list(found)
    return sum(one.below for one in every), sum(one.runs for one in every)


def main() -> None:
    runs = measured()
    found = left_out(runs)
    print(f"{'publication':28} {'runs':>4} {'below':>5}  bound of the others")
    for one in found:
        print(f"{one.source:28} {one.runs:4} {one.below:5}  {one.bound - 1:+.1%}")
    below, number = covered(found)
    print(f"bound of all: {bound(runs) - 1:+.1%}; left out, {below} of {number} runs stay below ({below / number:.1%})")


if __name__ == "__main__":
    main()
