"""A rank of a run whose ranks split the model is killed: the example trains what an undisturbed run trains."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.strategies.faults.faulty_run import ROOT, FaultyRun

STEPS, SAVED_EVERY, KILLED_AFTER = 20, 4, 9
SIZES = ("--steps", str(STEPS), "--layers", "4", "--hidden", "64", "--heads", "4", "--sequence-length", "64")
EXAMPLE = (str(ROOT / "scripts" / "examples" / "train_gpt.py"), *SIZES)
NATIVE = ("--backend", "native")
Losses = dict[tuple[int, int], float]
"""By rank and step."""


def _run(directory: Path, flags: tuple[str, ...], *more: str) -> FaultyRun:
    options = (*flags, "--nproc", "4", "--checkpoint-steps", str(SAVED_EVERY), "--retries", "2")
    return FaultyRun(directory, {}, options=options, script=(*EXAMPLE, *more))


def _losses(run: FaultyRun) -> Losses:
    """The last loss of each step that each rank has noted."""
    found: Losses = {}
    for path in run.run_directory.glob("metrics-rank*.jsonl"):
        rank = int(path.stem.removeprefix("metrics-rank"))
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found |= {(rank, row["global_step"]): row["loss"] for row in rows if row["event"] == "step"}
    return found


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
    found = _losses(run)
    assert {step for _, step in found} == set(range(1, STEPS + 1))
    return found


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
    found = _losses(run)
    assert found.keys() == right.keys()
    assert [found[each] for each in sorted(found)] == [right[each] for each in sorted(right)]
