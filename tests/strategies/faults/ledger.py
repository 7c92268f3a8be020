"""Reads the ledgers of a run: the steps that count, their losses, and which sample was trained on when."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One attempt as its ranks wrote it down: their processes, the plan, the step it resumed from, and its rows by rank
    and step."""

    number: int
    plan: tuple[Any, ...]
    processes: tuple[int, ...]
    resumed_at: int
    rows: dict[int, dict[int, dict[str, Any]]]

    @property
    def began(self) -> float:
        """Seconds since 1970."""
        return self.number / 1e9

    @property
    def last_step(self) -> int:
        """The highest step that a rank began to make, `resumed_at` where none did."""
        return max((step for rows in self.rows.values() for step in rows), default=self.resumed_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a run at some time: the last step that a rank had begun, and how many steps had been saved."""

    step: int
    checkpoints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of the lineage: the mean loss of its global batch, and the samples in it."""

    step: int
    epoch: int
    loss: float
    samples: tuple[int, ...]


def read_starts(directory: Path) -> list[Start]:
    """The attempts in the order they began; those that did not come as far as the loop left nothing."""
    by_number: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_text().splitlines():
            row = json.loads(line)
            start = by_number.setdefault(row["start"], {"opening": row, "processes": [], "rows": {}})
            rows = start["rows"].setdefault(rank, {})
            if "resumed_at" in row:
                same = ("resumed_at", "plan")
                assert all(row[name] == start["opening"][name] for name in same), f"ranks disagree: {start}, {row}"
                start["processes"].append(row["pid"])
            else:
                expected = max(rows, default=start["opening"]["resumed_at"]) + 1
                assert row["step"] == expected, f"rank {rank} made step {row['step']} and step {expected} was next"
                rows[row["step"]] = row
    return [
        Start(
            number=number,
            plan=tuple(start["opening"]["plan"]),
            processes=tuple(start["processes"]),
            resumed_at=start["opening"]["resumed_at"],
            rows=start["rows"],
        )
        for number, start in sorted(by_number.items())
    ]


def progress(starts: list[Start], when: float) -> Progress:
    """Return how far a run was at a time in seconds since 1970, as far as its ranks had written down by then."""
    begun = [start for start in starts if start.began <= when]
    rows = [[row for rows in start.rows.values() for row in rows.values() if row["time"] <= when] for start in begun]
    step = max((row["step"] for row in rows[-1]), default=begun[-1].resumed_at) if begun else 0
    return Progress(step=step, checkpoints=len({row["newest"] for of_start in rows for row in of_start} - {0}))


def lineage(starts: list[Start]) -> list[Step]:
    """The steps that the last weights went through: an attempt that resumes from a step replaces all after it."""
    steps: list[tuple[Start, int]] = []
    for start in starts:
        gap = f"an attempt resumed from step {start.resumed_at}, and the ones before came to {len(steps)}"
        assert start.resumed_at <= len(steps), gap
        steps[start.resumed_at :] = [(start, step) for step in range(start.resumed_at + 1, start.last_step + 1)]
    return [_joined(start, step) for start, step in steps]


def _joined(start: Start, step: int) -> Step:
    rows = [rows[step] for _, rows in sorted(start.rows.items()) if step in rows]
    assert len(rows) == start.plan[2], f"step {step} was made by {len(rows)} of {start.plan[2]} ranks"
    assert len({row["epoch"] for row in rows}) == 1
    samples = tuple(sample for row in rows for sample in row["samples"])
    loss = sum(row["loss"] for row in rows) / len(rows)
    return Step(step=step, epoch=rows[0]["epoch"], loss=loss, samples=samples)


def misused_samples(steps: list[Step], length: int) -> dict[int, list[int]]:
    """By epoch, samples that were not trained on exactly once; in the last epoch, which may be cut short, more often
    than once. `length` is the number of samples, a multiple of the global batch."""
    used: dict[int, Counter[int]] = {}
    for step in steps:
        used.setdefault(step.epoch, Counter()).update(step.samples)
    last = max(used, default=0)
    assert sorted(used) == list(range(last + 1)), f"epochs {sorted(used)}"
    wrong: dict[int, list[int]] = {}
    for epoch, counts in used.items():
        cut_short = epoch == last and sum(counts.values()) < length
        bad = [sample for sample in range(length) if counts[sample] > 1 or (not counts[sample] and not cut_short)]
        if bad or any(sample not in range(length) for sample in counts):
            wrong[epoch] = bad
    return wrong


def worst_difference(steps: list[Step], reference: list[Step]) -> float:
    """The largest difference of a step's loss from the uninterrupted run's, whose steps have to be the same."""
    assert [step.step for step in steps] == [step.step for step in reference]
    return max(abs(step.loss - expected.loss) for step, expected in zip(steps, reference, strict=True))
