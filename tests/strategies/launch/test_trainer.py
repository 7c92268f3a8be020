"""A HF Trainer script, which knows nothing of dsplan, resumes from its own newest save."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.strategies.launch.command import EXAMPLES, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("trainer_script.py")


def _losses(directory: Path, word: str) -> tuple[dict[str, float], list[str]]:
    """The losses of all steps, and how attempts ended that did not complete."""
    output = directory / word
    finished = run("--strategy", "ddp", "--json", directory / SCRIPT.name, str(output), word, cwd=directory)
    assert finished.status == 0, finished.err
    endings = [attempt["ending"]["kind"] for attempt in finished.json["attempts"] if attempt["ending"]]
    return json.loads(output.with_suffix(".losses").read_text()), endings


def test_a_killed_trainer_makes_the_steps_of_one_that_was_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for file in (SCRIPT, EXAMPLES / "stdlib_text.py"):
        shutil.copy(file, tmp_path)
    expected, endings = _losses(tmp_path, "quiet")
    assert (len(expected), endings) == (10, [])
    found, endings = _losses(tmp_path, "faulty")
    assert endings == ["killed"]
    assert found == expected
