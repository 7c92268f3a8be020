"""A HF Trainer script, which knows nothing of dsplan, resumes from its own newest save."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.strategies.launch.command import EXAMPLES, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("trainer_script.py")
ACCELERATE = Path(__file__).with_name("accelerate_script.py")


def _losses(directory: Path, strategy: str, word: str) -> tuple[dict[str, float], list[str]]:
    """The losses of all steps, and how attempts ended that did not complete."""
    output = directory / f"{strategy}-{word}"
    finished = run(
        "--nproc", "2", "--strategy", strategy, "--json", directory / SCRIPT.name, str(output), word, cwd=directory
    )
    assert finished.status == 0, finished.err
    endings = [attempt["ending"]["kind"] for attempt in finished.json["attempts"] if attempt["ending"]]
    return json.loads(output.with_suffix(".losses").read_text()), endings


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_killed_trainer_makes_the_steps_of_one_that_was_left_alone(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("transformers")
    for file in (SCRIPT, EXAMPLES / "stdlib_text.py"):
        shutil.copy(file, tmp_path)
    expected, endings = _losses(tmp_path, strategy, "quiet")
    assert (len(expected), endings) == (10, [])
    losses, endings = _losses(tmp_path, strategy, "faulty")
    assert endings == ["killed"]
    assert losses == expected
    if strategy != "ddp":
        assert list(expected.values()) == pytest.approx(list(_losses(tmp_path, "ddp", "quiet")[0].values()), abs=2e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_accelerate_trains_saves_and_loads_its_state(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("accelerate")
    for file in (ACCELERATE, EXAMPLES / "stdlib_text.py"):
        shutil.copy(file, tmp_path)
    losses = {}
    for name in ("ddp", strategy):
        output = tmp_path / name
        output.mkdir()
        for words in ([], ["resume"]):
            command = ("--nproc", "2", "--strategy", name, "--json", tmp_path / ACCELERATE.name, str(output), *words)
            finished = run(*command, cwd=tmp_path)
            assert finished.status == 0, finished.err
            assert finished.json["plan"]["plan"]["strategy"] == name
        losses[name] = json.loads((output / "losses.json").read_text())
        assert json.loads((output / "resumed.json").read_text()) == pytest.approx(losses[name], abs=1e-6)
    assert losses[strategy] == pytest.approx(losses["ddp"], abs=1e-5)
