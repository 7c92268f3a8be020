"""Runs that do not end well, on real processes: what is said, what is stored, and that nothing is left running."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsplan.__main__ import main
from hardware_db.files import database_path
from hardware_db.store import open_store
from strategies.run_directory.journal import Journal
from tests.strategies.launch.command import EXAMPLES, is_alive, run, start_run

PLANNED = f"""
import os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import dsplan, torch
from stdlib_text import StdlibText

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 32)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(),
                                                              torch.nn.Linear(64, 32)) for _ in range(2))
        self.head = torch.nn.Linear(32, 256)
    def forward(self, input_ids, labels):
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

engine, *_ , loader, _ = dsplan.initialize(model=Model(), training_data=StdlibText(length=64, windows=64),
                                           config={{"train_batch_size": 8}})
def train(steps):
    for _, batch in zip(range(steps), loader):
        engine.backward(engine(**batch))
        engine.step()
"""
WAITING = """
import os, pathlib, time
folder = pathlib.Path(os.environ["PIDS"])
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(120)
"""


def _script(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(source)
    return path


def _wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_a_failing_rank_is_named_with_its_last_words_and_its_log(tmp_path: Path) -> None:
    source = "import os\nprint('to stdout')\nif os.environ['RANK'] == '1':\n    raise ValueError('bad thing')\n"
    finished = run(_script(tmp_path, source), cwd=tmp_path)
    assert finished.status == 1
    last = finished.err.splitlines()[-1]
    assert last.startswith("dsplan: rank 1: ValueError: bad thing; log: ")
    assert "ValueError: bad thing" in Path(last.partition("log: ")[2]).read_text()
    assert "to stdout" in finished.out
    assert "rank_main" not in finished.err
    assert "session.py" not in finished.err


@pytest.mark.slow
def test_running_out_of_memory_is_stored_as_such_and_comes_back_from_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script(tmp_path, PLANNED + "train(3)\ntorch.empty(1 << 60)\n")
    finished = run("--json", "--nproc", "1", script, cwd=tmp_path)
    document = finished.json
    assert (finished.status, document["outcome"]) == (1, "out_of_memory")
    assert document["measured"]["steps"] == 3
    with open_store() as store:
        (row,) = store.list()
    assert (row.id, row.outcome, row.measured.steps) == (document["measurement_id"], "out_of_memory", 3)
    database_path().unlink()
    assert main(["db", "import", document["run_directory"]]) == 0
    assert capsys.readouterr().out == "1 records imported, 0 were there already\n"
    with open_store() as store:
        assert store.list() == (row,)
    assert main(["db", "import", document["run_directory"]]) == 0
    assert capsys.readouterr().out == "0 records imported, 1 were there already\n"


def test_a_directory_without_a_measured_run_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "import", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no measured run; name a run directory of `dsplan run`" in capsys.readouterr().err
    Journal(tmp_path).append("measured", 0, measurement={"kind": "measurement", "schema_version": 1, "id": "3"})
    assert main(["db", "import", str(tmp_path)]) == 2
    assert "run.jsonl: created_at is missing; correct or remove the line" in capsys.readouterr().err


@pytest.mark.slow
def test_bad_input_to_the_engine_is_one_line_and_status_two(tmp_path: Path) -> None:
    source = "import dsplan, torch\ndsplan.initialize(model=torch.nn.Linear(2, 2), strategy='zero9')\n"
    finished = run("--nproc", "1", _script(tmp_path, source), cwd=tmp_path)
    assert finished.status == 2
    assert "unknown strategy 'zero9'" in finished.err.splitlines()[-1]
    assert "Traceback" not in finished.err


@pytest.mark.slow
def test_killing_the_command_stops_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("PIDS", str(folder))
    process = start_run(_script(tmp_path, WAITING), cwd=tmp_path)
    try:
        _wait_for(lambda: len([path for path in folder.iterdir() if path.read_text()]) == 2)
        pids = [int(path.read_text()) for path in folder.iterdir()]
        process.kill()
        process.communicate(timeout=60)
        _wait_for(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        process.kill()


@pytest.mark.slow
def test_a_second_interrupt_stops_every_rank_at_once_and_the_run_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("PIDS", str(folder))
    process = start_run(_script(tmp_path, PLANNED + "train(3)\n" + WAITING), cwd=tmp_path)
    try:
        _wait_for(lambda: len([path for path in folder.iterdir() if path.read_text()]) == 2)
        pids = [int(path.read_text()) for path in folder.iterdir()]
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the ranks train nothing that they could save at the end of a step
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        _wait_for(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in out
    with open_store() as store:
        assert [row.outcome for row in store.list()] == ["interrupted"]


@pytest.mark.slow
def test_a_script_that_trains_nothing_is_run(tmp_path: Path) -> None:
    source = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\nsys.exit(0)\n"
    finished = run("--nproc", "1", _script(tmp_path, source), "--nproc", "7", cwd=tmp_path)
    assert finished.status == 0
    assert "0 1 ['--nproc', '7']" in finished.out
    assert "--nproc after the script is the script's" in finished.err
    assert "no training step was seen" in finished.out


@pytest.mark.slow
def test_the_exit_text_of_a_script_is_the_reason(tmp_path: Path) -> None:
    finished = run("--nproc", "1", _script(tmp_path, "import sys\nsys.exit('no data here')\n"), cwd=tmp_path)
    assert finished.status == 1
    assert "no data here" in finished.err.splitlines()[-1]
