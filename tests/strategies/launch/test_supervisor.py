"""Runs that are disturbed, on real processes: they reach their last step, and say what happened."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hardware_db.store import open_store
from strategies.run_directory.journal import read_journal
from strategies.telemetry.metrics import lineage, read_metrics
from tests.strategies.faults.faulty_run import wait_for
from tests.strategies.launch.command import is_alive, run, start_run

STEPS = 14
SCRIPT = f"""
import os, pathlib, time
import dsplan, torch

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return {STEPS * 8}
    def __getitem__(self, index):
        return {{"ids": torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))}}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 32)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(),
                                                              torch.nn.Linear(64, 32)) for _ in range(2))
        self.head = torch.nn.Linear(32, 64)
    def forward(self, ids):
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())

def once(name):
    path = pathlib.Path(os.environ["DSPLAN_RUN_DIR"], name)
    new = os.environ["RANK"] == "1" and not path.exists()
    path.touch() if new else None
    return new

torch.manual_seed(0)
engine, *_, loader, _ = dsplan.initialize(model=Model(), training_data=Tokens(), config={{"train_batch_size": 8}})
for batch in loader:
    engine.backward(engine(**batch))
    engine.step()
    time.sleep(0.1)
    FAULT
"""


def _script(tmp_path: Path, fault: str = "pass") -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("FAULT", fault))
    return path


def _steps(directory: Path) -> list[int]:
    """The global steps in the lineage of rank 0, as they are on disk now."""
    return [row["global_step"] for row in lineage(read_metrics(directory, 1)[0])]


def _at_step(process: subprocess.Popen[str], directory: Path, step: int) -> None:
    deadline = time.monotonic() + 100
    while not any(number >= step for number in _steps(directory)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


FAULTS = """if engine.global_steps == 5 and once('agent'):
        os.kill(os.getppid(), 9)
    if engine.global_steps == 10 and once('rank'):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_the_launcher_and_then_a_rank_are_killed_and_the_page_tells(tmp_path: Path) -> None:
    finished = run(
        "--strategy", "ddp", "--checkpoint-steps", "3", "--json", _script(tmp_path, FAULTS), cwd=tmp_path
    )  # fmt: skip
    ended = finished.json
    assert (finished.status, ended["outcome"], ended["measured"]["steps"]) == (0, "completed", STEPS), finished.err
    first, second, third = ended["attempts"]
    endings = [
        (ending["kind"], ending["rank"], ending["exit_status"]) for ending in (first["ending"], second["ending"])
    ]
    assert endings == [("killed", None, -9), ("killed", 1, -9)]
    assert [first["decision"]["action"], second["decision"]["action"], third["ending"]] == ["restart", "restart", None]
    assert 1 < third["first_step"] <= second["last_step"] + 1
    assert second["seconds_lost"] > 0
    directory = Path(ended["run_directory"])
    assert _steps(directory) == list(range(1, STEPS + 1))
    assert _ranks_of(directory) == []
    kinds = ("attempt", "ending", "decision", "back", "end")
    events = [row["event"] for row in read_journal(directory) if row["event"] in kinds]
    assert events == ["attempt", *(["ending", "decision", "attempt", "back"] * 2), "end"]
    page = (directory / "report.md").read_text()
    assert f"completed: {STEPS} steps, 3 attempts" in page
    assert "the launcher was killed by signal 9" in page
    assert "dsplan: rank 1, step 10: killed by signal 9; starts again" in finished.err


def test_a_run_is_gone_on_with_after_a_kill_and_after_a_stop(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    script = _script(tmp_path)
    begun = start_run(
        "--strategy", "ddp", "--checkpoint-steps", "2", "--run-dir", directory, "--grace-seconds", "60", script,
        cwd=tmp_path,
    )  # fmt: skip
    try:
        _at_step(begun, directory, 4)
        ranks = [int(path.read_text()) for path in directory.glob("rank*.pid")]
        begun.kill()
    finally:
        begun.communicate(timeout=60)
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), seconds=60)  # until then they may still save
    (directory / "checkpoints.jsonl").unlink()  # what lies in checkpoints/ counts
    resumed = start_run("--resume", directory, cwd=tmp_path)
    try:
        _at_step(resumed, directory, 7)
        resumed.send_signal(signal.SIGTERM)
        out, err = resumed.communicate(timeout=60)
    finally:
        resumed.kill()
    assert resumed.returncode == 75, err
    assert "checkpoints.jsonl is gone and does not name the checkpoints of step" in err
    assert "dsplan: resumed at step" in err
    assert f"and saved; resume with dsplan run --resume {directory}" in out
    assert [row["outcome"] for row in read_journal(directory) if row["event"] == "end"] == ["preempted"]
    steps = _steps(directory)
    assert steps == list(range(1, len(steps) + 1))
    assert 7 <= len(steps) < STEPS
    assert [row["kind"] for row in read_journal(directory) if row["event"] == "ending"] == ["preempted"]
    page = (directory / "report.md").read_text()
    assert "dsplan run itself was ended" in page
    assert "preempted: stopped at step" in page


@pytest.mark.slow
def test_an_interrupted_run_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    begun = start_run(
        "--strategy", "ddp", "--checkpoint-steps", "50", "--run-dir", directory, _script(tmp_path), cwd=tmp_path
    )  # fmt: skip
    try:
        _at_step(begun, directory, 4)
        begun.send_signal(signal.SIGINT)
        out, err = begun.communicate(timeout=60)
    finally:
        begun.kill()
    assert begun.returncode == 130, err
    assert "saving and stopping; Ctrl-C again ends the run at once" in err
    assert f"with dsplan run --resume {directory}" in out
    last = run("--resume", directory, cwd=tmp_path)
    assert last.status == 0, last.err
    assert _steps(directory) == list(range(1, STEPS + 1))


LEAVES = """if engine.global_steps == 7 and os.environ["RANK"] == "1" and not pathlib.Path("mended").exists():
        raise SystemExit(0)
"""


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_and_a_run_without_checkpoints_is_not_begun_anew_unasked(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first = run(
        "--strategy", "ddp", "--checkpoint-steps", "3", "--run-dir", directory, _script(tmp_path, LEAVES), cwd=tmp_path
    )  # fmt: skip
    assert first.status == 1
    left = "ended with status 0 at step 7 while the others were training"
    assert [line for line in first.err.splitlines() if line.startswith("dsplan: rank 1: ")] == [
        f"dsplan: rank 1: {left}; log: {directory}/rank1.stderr.log"
    ]
    endings = [row for row in read_journal(directory) if row["event"] in ("ending", "decision")]
    assert [row.get("rank", row.get("action")) for row in endings] == [1, "restart", 1, "give_up"]

    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints.jsonl").unlink()
    (tmp_path / "mended").touch()
    refused = run("--resume", directory, cwd=tmp_path)
    assert refused.status == 2
    assert f"the run came to step 7 and no checkpoint is left (looked in {directory}/checkpoints)" in refused.err
    assert "Traceback" not in refused.err
    assert _steps(directory)[-1] == 7
    anew = run("--resume", directory, "--resume-from", "start", cwd=tmp_path)
    assert anew.status == 0, anew.err
    assert _steps(directory) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_out_of_memory_brings_a_smaller_plan_and_is_remembered(tmp_path: Path) -> None:
    fault = "if engine.global_steps == 5 and once('full'): raise torch.OutOfMemoryError('CUDA out of memory.')"
    finished = run("--checkpoint-steps", "2", "--json", _script(tmp_path, fault), cwd=tmp_path)
    ended = finished.json
    assert (finished.status, ended["outcome"], ended["measured"]["steps"]) == (0, "completed", STEPS), finished.err
    first, second = ended["attempts"]
    assert (first["ending"]["kind"], first["decision"]["action"]) == ("out_of_memory", "next_plan")
    assert first["plan"] != second["plan"]
    assert first["plan"]["global_batch_size"] == second["plan"]["global_batch_size"] == 8
    with open_store() as store:
        rows = {row.outcome: row for row in store.list()}
    assert set(rows) == {"completed", "out_of_memory"}
    smaller, larger = (rows[name].predicted.peak_allocated_bytes for name in ("completed", "out_of_memory"))
    assert smaller is not None
    assert larger is not None
    assert smaller < larger


def _ranks_of(directory: Path) -> list[str]:
    """Command lines of live processes that name the run directory."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in command and "rank_main" in command:
            commands.append(command)
    return commands
