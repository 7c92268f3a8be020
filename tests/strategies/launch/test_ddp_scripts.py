"""`dsplan run` on a script of one's own around DDP or FSDP: what was asked for takes DDP's place, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.strategies.launch.command import Finished, run

pytestmark = pytest.mark.slow  # each starts ranks that import torch
SCRIPT = Path(__file__).with_name("ddp_script.py")


def trained(folder: Path, strategy: str, wrapper: str = "ddp", who: str = "all") -> Finished:
    options = ("--strategy", strategy) if strategy else ()
    return run("--nproc", "2", *options, "--run-dir", f"run-{strategy}", SCRIPT, wrapper, who, cwd=folder)


def losses(finished: Finished) -> list[str]:
    return [line for line in finished.out.splitlines() if line.startswith("step ") and " norm " in line]


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The script where nothing is asked for: DDP stays."""
    folder = tmp_path_factory.mktemp("ddp")
    return trained(folder, ""), folder / "run-"


def test_ddp_stays_where_nothing_is_asked_and_is_predicted_and_measured(by_ddp: tuple[Finished, Path]) -> None:
    finished, directory = by_ddp
    assert finished.status == 0, finished.err
    assert "plan: ddp (torch), micro-batch 4 x accumulation 2, fp32" in finished.out
    assert "takes the place" not in finished.out
    assert "step time" in finished.out
    rows = [json.loads(line) for line in (directory / "metrics-rank0.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["samples"] for row in steps] == [8] * 4
    assert all(row["loss"] > 1 for row in steps)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "fsdp-grad-op", "zero1", "zero3"])
def test_a_strategy_takes_the_place_of_ddp_with_its_results(
    strategy: str, by_ddp: tuple[Finished, Path], tmp_path: Path
) -> None:
    finished = trained(tmp_path, strategy)
    assert finished.status == 0, finished.err
    assert f"dsplan: {strategy} takes the place of DDP at ddp_script.py, line 48" in finished.out
    assert f"plan: {strategy} (" in finished.out
    assert losses(finished) == losses(by_ddp[0])
    ours, expected = (torch.load(folder / "model.pt") for folder in (tmp_path / f"run-{strategy}", by_ddp[1]))
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert (ours[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize(
    ("strategy", "wrapper", "line"),
    [
        ("zero3", "fsdp", "ddp_script.py, line 51: the script shards its model itself, so strategy 'zero3' cannot be"),
        ("fsdp", "fsdp", ""),
        ("hsdp", "ddp", "strategy 'hsdp' needs at least 4 ranks"),
    ],
)
def test_what_cannot_take_the_place_is_refused(strategy: str, wrapper: str, line: str, tmp_path: Path) -> None:
    finished = trained(tmp_path, strategy, wrapper, who="rank 0" if line else "all")
    assert finished.status == (2 if line else 0), finished.err
    assert line in finished.err


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_rank_0_alone_is_named_by_the_line(strategy: str, tmp_path: Path) -> None:
    finished = trained(tmp_path, strategy, who="rank 0")
    assert finished.status == 2
    assert "ddp_script.py, line 68: rank 0 calls the model without gradients alone" in finished.err
