"""A Trainer under supervision: which of its trainings resumes from a checkpoint of an earlier attempt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.errors import CannotRun
from strategies.launch.hooks import huggingface as hook
from strategies.run_directory.journal import Journal
from strategies.supervision import lineage
from strategies.variables import RUN_DIRECTORY
from tests.strategies.attempts import attempt_options


class _Trainer:
    """The part of a Trainer that `supervise` needs; keeps what its `train` was asked for."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(output_dir=str(output))
        self.resumed_from: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        pass

    def train(self, resume_from_checkpoint: Any = None) -> None:
        self.resumed_from.append(resume_from_checkpoint)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of a run that came to step 9 and whose Trainer saved steps 3 and 6, without a list."""
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(hook, "_trains_again", False)
    monkeypatch.setattr(hook, "_Supervised", lambda *arguments: SimpleNamespace(loss_is=None))
    for step in (3, 6):
        saved = tmp_path / "out" / f"checkpoint-{step}"
        saved.mkdir(parents=True)
        (saved / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path


def _ask_trainer(run: Path, resume_from_checkpoint: Any = None, **options: Any) -> Any:
    """Return what the Trainer of the next attempt is asked to resume from."""
    later = {"checkpoint_directory": "c", "attempt": 1, "resumes": True, "reached": 9, "may_begin_anew": False}
    attempt_options(**{**later, **options}).save(run)
    trainer = _Trainer(run / "out")
    hook.supervise(trainer)
    trainer.train(resume_from_checkpoint)
    return trainer.resumed_from[0]


def test_a_trainer_resumes_from_what_is_on_disk(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _ask_trainer(run) == str(run / "out" / "checkpoint-6")
    assert "does not name checkpoints in" in capsys.readouterr().err


def test_a_trainer_says_that_its_newest_checkpoint_is_gone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 6):
        path = str(run / "out" / f"checkpoint-{step}")
        Journal(run).append("saved", 0, step=step, path=path, by="huggingface")
    (run / "out" / "checkpoint-6" / "trainer_state.json").write_text('{"global_st')
    assert _ask_trainer(run) == str(run / "out" / "checkpoint-3")
    told = capsys.readouterr().err
    assert "the checkpoint of step 6 is gone or not complete: the steps after 3 are made again" in told


def test_a_trainer_of_which_nothing_is_left_begins_anew_only_with_a_word(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "out")
    with pytest.raises(CannotRun, match=r"came to step 9 and no checkpoint is left \(looked in .*/out\)"):
        _ask_trainer(run)
    monkeypatch.setattr(hook, "_trains_again", False)
    assert _ask_trainer(run, may_begin_anew=True) is None
    assert "it begins at step 1 again" in capsys.readouterr().err
    monkeypatch.setattr(hook, "_trains_again", False)
    assert _ask_trainer(run, "own/checkpoint-4") == "own/checkpoint-4"


def test_a_trainer_begins_anew_or_where_it_was_told_to(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ask_trainer(run, since=1, reached=0, may_begin_anew=True) is None
    monkeypatch.setattr(hook, "_trains_again", False)
    older = str(run / "out" / "checkpoint-3")
    assert _ask_trainer(run, since=1, base=older) == older


def test_only_the_first_training_of_a_process_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(hook, "_trains_again", False)
    monkeypatch.setattr(hook, "_Supervised", lambda *arguments: SimpleNamespace(loss_is=None))
    attempt_options(checkpoint_directory="c", attempt=1).save(tmp_path)
    saved = tmp_path / "out" / "checkpoint-5"
    saved.mkdir(parents=True)
    (saved / "trainer_state.json").write_text("{}")
    lineage.note(tmp_path, lineage.RunCheckpoint(path=str(saved), step=5, attempt=0, by="huggingface"))
    first, second = _Trainer(tmp_path / "out"), _Trainer(tmp_path / "out")
    for trainer in (first, second):
        hook.supervise(trainer)
    first.train()
    first.train()
    second.train()
    assert first.resumed_from == [str(saved), None]
    assert second.resumed_from == [None]
