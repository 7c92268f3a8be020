"""A rank of a run whose ranks split the model is killed: the example trains what an undisturbed run trains."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from strategies.checkpoint import safefile
from strategies.checkpoint.retention import published
from tests.strategies.faults.faulty_run import ROOT, FaultyRun

STEPS, SAVED_EVERY, KILLED_AFTER = 20, 4, 9
SIZES = ("--steps", str(STEPS), "--layers", "4", "--hidden", "64", "--heads", "4", "--sequence-length", "64")
EXAMPLE = (str(ROOT / "scripts" / "examples" / "train_gpt.py"), *SIZES)
NATIVE = ("--backend", "native")
Losses = dict[tuple[int, int], float]
"""By rank and step."""


def _run(directory: Path, flags: tuple[str, ...], *more: str) -> FaultyRun:
    return FaultyRun(directory, {}, options=_options(flags, SAVED_EVERY), script=(*EXAMPLE, *more))


def _options(flags: tuple[str, ...], saved_every: int) -> tuple[str, ...]:
    return (*flags, "--nproc", "4", "--checkpoint-steps", str(saved_every), "--retries", "4")


def _losses(run: FaultyRun) -> Losses:
    """The last loss of each step that each rank has noted."""
    losses: Losses = {}
    for path in run.run_directory.glob("metrics-rank*.jsonl"):
        rank = int(path.stem.removeprefix("metrics-rank"))
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        losses |= {(rank, row["global_step"]): row["loss"] for row in rows if row["event"] == "step"}
    return losses


def _steps(run: FaultyRun) -> int:
    return max((step for _, step in _losses(run)), default=0)


def _killed(run: FaultyRun, rank: int) -> None:
    with run:
        run.start()
        assert run.until(lambda: _steps(run) >= KILLED_AFTER, f"step {KILLED_AFTER}", every=0.01), run.out
        os.kill(run.ranks()[rank], signal.SIGKILL)
        assert run.wait() == 0, run.out
        assert run.left_running() == []
    (ending,) = run.events("ending")
    assert (ending["kind"], ending["rank"]) == ("killed", rank)
    assert run.events("attempt")[-1]["saved"] >= SAVED_EVERY  # it has resumed, not begun again


def _right(directory: Path, flags: tuple[str, ...], *more: str) -> Losses:
    run = _run(directory, flags, *more)
    with run:
        run.start()
        assert run.wait() == 0, run.out
    losses = _losses(run)
    steps = int(more[-1]) if "--steps" in more else STEPS
    assert {step for _, step in losses} == set(range(1, steps + 1))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "more", "rank"),
    [
        (("--strategy", "fsdp", "--tp", "2"), (), 1),
        (("--strategy", "fsdp", "--pp", "2"), (), 3),
        (("--strategy", "fsdp", "--pp", "2", "--pp-schedule", "interleaved", "--virtual-stages", "2"), (), 0),
        (("--strategy", "fsdp", "--cp", "2"), (), 2),
        (("--strategy", "fsdp", "--ep", "2"), ("--experts", "4"), 3),
        (("--strategy", "ddp", "--tp", "2", "--pp", "2"), (), 2),
        (("--strategy", "zero2", *NATIVE, "--tp", "2"), (), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else f"rank {value}",
)
def test_a_killed_rank_changes_no_loss(
    flags: tuple[str, ...], more: tuple[str, ...], rank: int, tmp_path: Path
) -> None:
    right = _right(tmp_path / "undisturbed", flags, *more)
    run = _run(tmp_path / "killed", flags, *more)
    _killed(run, rank)
    losses = _losses(run)
    assert losses == right


WRITING, WRITTEN, PUBLISHING, PUBLISHED, CLEANING = (
    {"moment": "writing", "rank": 3, "step": 4},
    {"moment": "written", "rank": 2, "step": 6},
    {"moment": "publishing", "rank": 0, "step": 6},
    {"moment": "published", "rank": 0, "step": 6},
    {"moment": "cleaning", "rank": 0, "step": 2},
)
"""Each comes in an attempt of its own, and the next one resumes from the newest checkpoint that has its name."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("flags", "more", "between"),
    [
        (("--strategy", "fsdp", "--tp", "2", "--pp", "2"), (), PUBLISHING),
        (("--strategy", "ddp", "--tp", "2", "--pp", "2"), (), WRITTEN),
        (("--strategy", "fsdp", "--cp", "2"), (), WRITTEN),
        (("--strategy", "fsdp", "--ep", "2"), ("--experts", "4"), PUBLISHED),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value["moment"]),
)
def test_a_rank_killed_in_a_save_leaves_the_newest_whole_checkpoint(
    flags: tuple[str, ...], more: tuple[str, ...], between: dict[str, Any], tmp_path: Path
) -> None:
    right = _right(tmp_path / "undisturbed", flags, *more, "--steps", "10")
    faults = (WRITING, between, CLEANING)
    script = (str(Path(__file__).with_name("dies_in_a_save.py")), *EXAMPLE, *more, "--steps", "10")
    run = FaultyRun(tmp_path / "killed", {}, faults=faults, options=_options(flags, 2), script=script)
    with run:
        run.start()
        assert run.wait() == 0, run.out
        assert run.left_running() == []
    endings = [(row["kind"], row["rank"]) for row in run.events("ending")]
    assert endings == [("killed", fault["rank"]) for fault in faults]
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+) from", run.out)]
    assert resumed == ([2, 6, 8] if between is PUBLISHED else [2, 4, 6]), run.out
    assert _losses(run) == right
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert (left[0], *left[-2:]) == ("latest", "step-00000008", "step-00000010")
    assert all(re.fullmatch(r"step-\d{8}", name) for name in left[1:])  # nothing hidden, which is what is not whole
    for path in published(run.checkpoints):
        sums = safefile.read(path)
        assert {name: safefile.sum_of(path / name) for name in sums} == sums
