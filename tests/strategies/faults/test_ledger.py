"""The suite's own measure: a ledger that lost, repeated or skipped something is told from one that did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.strategies.faults.ledger import Progress, lineage, misused_samples, progress, read_starts, worst_difference

LENGTH, BATCH = 8, 4


def write(directory: Path, start: int, resumed_at: int, steps: dict[int, tuple[int, float, list[int]]]) -> None:
    """One attempt of two ranks that began at second `start`: by step its epoch, its loss, and the samples of its global
    batch. A step takes a tenth of a second, and every second one was saved before it."""
    for rank in range(2):
        opening = {
            "start": start * 10**9,
            "resumed_at": resumed_at,
            "pid": 10 * start + rank,
            "plan": ["ddp", "torch", 2],
        }
        rows = [
            {
                "start": start * 10**9,
                "step": step,
                "epoch": epoch,
                "loss": loss + rank,
                "samples": samples[rank::2],
                "newest": (step - 1) // 2 * 2,
                "time": start + (step - resumed_at) / 10,
            }
            for step, (epoch, loss, samples) in steps.items()
        ]
        with (directory / f"rank{rank}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in (opening, *rows))


FIRST, SECOND = [0, 1, 2, 3], [4, 5, 6, 7]
ALL = {1: (0, 1.0, FIRST), 2: (0, 0.5, SECOND), 3: (1, 0.25, SECOND), 4: (1, 0.125, FIRST)}


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    directory = tmp_path / "reference"
    directory.mkdir()
    write(directory, 1, 0, ALL)
    return directory


def test_steps_that_were_made_again_count_once(tmp_path: Path, reference: Path) -> None:
    write(tmp_path, 1, 0, {1: (0, 1.0, FIRST), 2: (0, 9.0, FIRST), 3: (1, 9.0, FIRST)})
    write(tmp_path, 2, 1, {2: (0, 0.5, SECOND), 3: (1, 9.0, FIRST)})
    write(tmp_path, 3, 2, {3: ALL[3], 4: ALL[4]})
    steps = lineage(read_starts(tmp_path))
    assert [step.loss for step in steps] == [1.5, 1.0, 0.75, 0.625]
    assert misused_samples(steps, LENGTH) == {}
    assert worst_difference(steps, lineage(read_starts(reference))) == 0


def test_how_far_a_run_was_counts_saved_steps_once_over_all_attempts(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, ALL)
    write(tmp_path, 2, 2, {3: ALL[3], 4: ALL[4], 5: ALL[1], 6: ALL[2]})
    starts = read_starts(tmp_path)
    assert progress(starts, 0.5) == Progress(step=0, checkpoints=0)
    assert progress(starts, 1.25) == Progress(step=2, checkpoints=0)
    assert progress(starts, 1.9) == Progress(step=4, checkpoints=1)
    assert progress(starts, 2.05) == Progress(step=2, checkpoints=1)
    assert progress(starts, 2.35) == Progress(step=5, checkpoints=2)


def test_another_loss_a_lost_sample_and_one_used_twice_show(tmp_path: Path, reference: Path) -> None:
    write(tmp_path, 1, 0, {**ALL, 2: (0, 0.5625, [4, 5, 6, 0])})
    steps = lineage(read_starts(tmp_path))
    assert misused_samples(steps, LENGTH) == {0: [0, 7]}
    assert worst_difference(steps, lineage(read_starts(reference))) == 0.0625


def test_a_sample_may_be_missing_only_from_an_epoch_that_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, {step: ALL[step] for step in (1, 2, 3)})
    steps = lineage(read_starts(tmp_path))
    assert misused_samples(steps, LENGTH) == {}
    assert misused_samples(steps[:1] + steps[2:], LENGTH) == {0: [4, 5, 6, 7]}


def test_an_attempt_that_skips_steps_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, {1: ALL[1]})
    write(tmp_path, 2, 2, {3: ALL[3]})
    with pytest.raises(AssertionError, match="resumed from step 2, and the ones before came to 1"):
        lineage(read_starts(tmp_path))


def test_a_step_that_one_rank_did_not_make_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, ALL)
    path = tmp_path / "rank1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match="step 4 was made by 1 of 2 ranks"):
        lineage(read_starts(tmp_path))


def test_ranks_that_continue_from_different_steps_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, ALL)
    path = tmp_path / "rank1.jsonl"
    path.write_text(path.read_text().replace('"resumed_at": 0', '"resumed_at": 1', 1))
    with pytest.raises(AssertionError, match="ranks disagree"):
        read_starts(tmp_path)
