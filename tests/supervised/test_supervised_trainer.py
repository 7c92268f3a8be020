"""A Trainer under supervision: which of its trainings goes on with a checkpoint of an earlier attempt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.launch.hooks import huggingface_supervised as hook
from strategies.launch.orders import Orders
from strategies.supervised import lineage
from strategies.variables import RUN_DIRECTORY


class _Trainer:
    """What `supervise` needs of a Trainer; keeps what its `train` was asked for."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(output_dir=str(output))
        self.asked: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        pass

    def train(self, resume_from_checkpoint: Any = None) -> None:
        self.asked.append(resume_from_checkpoint)


def test_only_the_first_training_of_a_process_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(hook, "_trains_again", False)
    monkeypatch.setattr(hook, "_Supervised", lambda *arguments: SimpleNamespace(loss_is=None))
    Orders(checkpoint_directory="c", attempt=1).save(tmp_path)
    saved = tmp_path / "out" / "checkpoint-5"
    saved.mkdir(parents=True)
    (saved / "trainer_state.json").write_text("{}")
    lineage.note(tmp_path, lineage.Made(path=str(saved), step=5, attempt=0, by="huggingface"))
    first, second = _Trainer(tmp_path / "out"), _Trainer(tmp_path / "out")
    plan: Any = None
    for trainer in (first, second):
        hook.supervise(trainer, plan)
    first.train()
    first.train()
    second.train()
    assert first.asked == [str(saved), None]
    assert second.asked == [None]
