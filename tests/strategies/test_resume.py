"""The step where a run continues whose list, journal or checkpoints are lost, cut, damaged, moved or another run's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.run_directory.files import LINEAGE_FILE
from strategies.run_directory.journal import Journal
from strategies.supervision import lineage, resume
from tests.strategies import supervised_bodies
from tests.strategies.attempts import attempt_options
from tests.strategies.training_bodies import Recipe

DDP = Recipe(strategy="ddp", world_size=2)
LATER = {"run_id": "a", "attempt": 1, "resumes": True, "reached": 6, "may_begin_anew": False}


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps whose checkpoints of steps 4 and 6 are there and in its list and journal."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    ranks.run(supervised_bodies.run_saving, DDP, str(directory), 2, 2, "a")
    for checkpoint in lineage.read(directory):
        Journal(directory).append(
            "saved", 0, step=checkpoint.step, path=checkpoint.path, run=checkpoint.run, is_automatic=True
        )
    return directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, as if it had trained there."""
    shutil.copytree(trained, tmp_path / "run")
    for name in (LINEAGE_FILE, "run.jsonl"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace(str(trained), str(tmp_path / "run")))
    return tmp_path / "run"


def _lose_list(run: Path) -> None:
    (run / LINEAGE_FILE).unlink()


def _lose_list_and_journal(run: Path) -> None:
    _lose_list(run)
    (run / "run.jsonl").unlink()


def _cut_list(run: Path) -> None:
    path = run / LINEAGE_FILE
    path.write_bytes(path.read_bytes()[:-9])
    (run / "run.jsonl").write_text('{"event": "att')


def _move(run: Path) -> None:
    for name in (LINEAGE_FILE, "run.jsonl"):
        (run / name).write_text((run / name).read_text().replace(str(run), "/where/it/was"))


def _lose_newest(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000006")


def _damage_newest(run: Path) -> None:
    (run / "checkpoints" / "step-00000006" / "rank-00001.safetensors").write_bytes(b"")


def _list_of_another_run(run: Path) -> None:
    text = (run / LINEAGE_FILE).read_text().replace('"run": "a"', '"run": "b"')
    shutil.copytree(run / "checkpoints", run.parent / "other")
    (run / LINEAGE_FILE).write_text(text.replace(f"{run}/checkpoints", f"{run.parent}/other"))
    (run / "run.jsonl").unlink()


def _keep_all(run: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("lose", "step", "phrases"),
    [
        (_keep_all, 6, ["resumed at step 6 from"]),
        (_lose_list, 6, ["checkpoints.jsonl is gone and does not name the checkpoints of step", "resumed at step 6"]),
        (_lose_list_and_journal, 6, ["checkpoints.jsonl is gone", "resumed at step 6"]),
        (_cut_list, 6, ["checkpoints.jsonl has 1 line that cannot be read and does not name", "resumed at step 6"]),
        (_move, 6, ["checkpoints.jsonl is not complete", "resumed at step 6"]),
        (_lose_newest, 4, ["resumed at step 4", "the newer one of step 6 is gone, so 2 steps are made again"]),
        (_damage_newest, 4, ["rank-00001", "the newer one of step 6 cannot be loaded, so 2 steps are made again"]),
        (_list_of_another_run, 6, ["lists 3 checkpoints of another run: passed over", "resumed at step 6"]),
    ],
)
def test_a_run_resumes_from_what_is_on_disk(
    lose: Callable[[Path], None], step: int, phrases: list[str], run: Path, ranks: RankPool
) -> None:
    lose(run)
    (begun, told, refusal), (other, silence, _) = ranks.run(supervised_bodies.is_resumed, DDP, str(run), LATER)
    assert (begun, other, refusal, silence) == (step, step, "", "")
    assert all(words in told for words in phrases), told
    assert str(run / "checkpoints") in told.splitlines()[-1]
    if lose is _lose_list_and_journal:  # what was found is in the list again, and cleared away in time
        assert {6, 4} <= {checkpoint.step for checkpoint in lineage.read(run) if checkpoint.is_automatic}


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        ({}, -1, "the run came to step 6 and no checkpoint is left (looked in {run}/checkpoints); put its checkpoints"),
        ({"may_begin_anew": True}, 0, "no checkpoint was complete when the run was at step 6: it begins at step 1"),
        ({"since": 1, "may_begin_anew": True, "reached": 0}, 0, ""),
        ({"since": 1, "base": "{run}/gone"}, -1, "the checkpoint {run}/gone to resume from is not there"),
    ],
)
def test_a_run_of_which_nothing_is_left_never_begins_anew_without_a_word(
    options: dict[str, Any], step: int, words: str, run: Path, ranks: RankPool
) -> None:
    shutil.rmtree(run / "checkpoints")
    options = {name: value.format(run=run) if isinstance(value, str) else value for name, value in options.items()}
    for rank, answer in enumerate(ranks.run(supervised_bodies.is_resumed, DDP, str(run), LATER | options)):
        assert answer[0] == step
        if step < 0:
            assert words.format(run=run) in answer[2]
            assert answer[2].endswith(f"begin anew with dsplan run --resume {run} --resume-from start")
            assert "\n" not in answer[2]
        elif rank == 0:
            assert words in answer[1]


def test_a_run_whose_checkpoints_are_all_damaged_says_what_to_do(run: Path, ranks: RankPool) -> None:
    for path in run.glob("checkpoints/step-*/rank-00000.safetensors"):
        path.write_bytes(b"")
    for step, _, refusal in ranks.run(supervised_bodies.is_resumed, DDP, str(run), LATER):
        assert step == -1
        assert "step-00000006" in refusal
        assert refusal.endswith(f"or begin anew with dsplan run --resume {run} --resume-from start")


def test_a_script_that_loads_its_own_checkpoint_is_not_refused(run: Path, ranks: RankPool) -> None:
    own = run.parent / "own"
    (run / "checkpoints").rename(own)
    _lose_list_and_journal(run)
    for step, _, refusal in ranks.run(supervised_bodies.is_resumed, DDP, str(run), LATER, str(own)):
        assert (step, refusal) == (6, "")


def test_begun_anew_only_what_came_after_counts(run: Path, ranks: RankPool) -> None:
    anew = LATER | {"since": 1, "reached": 0, "may_begin_anew": True}
    (step, _, _), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), anew)
    assert step == 0
    (step, told, _), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), anew, str(run / "checkpoints"))
    assert step == 0
    assert "is not loaded: the run begins anew" in told
    named = LATER | {"since": 1, "base": str(run / "checkpoints" / "step-00000004")}
    (step, told, _), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), named)
    assert (step, "resumed at step 4" in told) == (4, True)


def test_checkpoints_of_another_run_in_a_shared_directory_are_left_alone(run: Path, ranks: RankPool) -> None:
    shared = run.parent / "shared"
    (run / "checkpoints").rename(shared)
    _lose_list_and_journal(run)
    options = LATER | {"checkpoint_directory": str(shared)}
    (step, _, refusal), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), options | {"run_id": "b"})
    assert step == -1
    assert f"looked in {shared}, {run}/checkpoints" in refusal
    (step, _, _), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), options)
    assert step == 6


def test_the_last_node_resumes_from_what_another_nodes_rank_0_has_saved(run: Path, ranks: RankPool) -> None:
    other = LATER | {"run_id": "b"}
    (step, _, refusal), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), other)
    assert (step, refusal != "") == (-1, True)
    (step, told, _), _ = ranks.run(supervised_bodies.is_resumed, DDP, str(run), other | {"has_nodes": True})
    assert step == 6
    assert "another run" not in told


def test_only_the_runs_own_checkpoints_are_cleared_away(run: Path) -> None:
    checkpoints = lineage.read(run)
    assert [path.name for path in lineage.outdated(checkpoints, 1, run="a")] == ["step-00000004"]
    assert lineage.outdated(checkpoints, 0, run="b") == []
    assert lineage.outdated(checkpoints, 0, run="a", since=1) == []
    # Where nodes come and go, the last one clears away what another node's rank 0 has saved.
    assert [path.name for path in lineage.outdated(checkpoints, 1, run="b", has_nodes=True)] == ["step-00000004"]


def test_a_node_that_came_late_lists_what_others_have_saved(run: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    late.mkdir()
    others = lineage.read_lineage(run)
    options = attempt_options(checkpoint_directory=str(run / "checkpoints"), run_id="b", has_nodes=True)
    candidates = resume._choose([lineage.Lineage(), others], late, options)
    assert [checkpoint.step for checkpoint in candidates.newest_first] == [6, 4]
    assert [(checkpoint.step, checkpoint.run, checkpoint.is_automatic) for checkpoint in lineage.read(late)] == [
        (4, "a", True),
        (6, "a", True),
    ]
    resume._choose([lineage.read_lineage(late), others], late, options)
    assert len(lineage.read(late)) == 2


@pytest.mark.parametrize(
    "line",
    ['{"path": 5, "step": 1}', '{"path": "x"}', '{"path": "x", "step": "7"}', "[1]", "5", "{", "[" * 100_000, "\x00"],
)
def test_a_line_that_is_none_is_counted_and_the_rest_is_read(line: str, tmp_path: Path) -> None:
    (tmp_path / LINEAGE_FILE).write_text(line)
    lineage.note(tmp_path, lineage.RunCheckpoint(path=str(tmp_path), step=3))  # a cut line does not spoil the next one
    read = lineage.read_lineage(tmp_path)
    assert ([checkpoint.step for checkpoint in read.listed], read.damaged_lines) == ([3], 1)
    assert json.loads((tmp_path / LINEAGE_FILE).read_text().splitlines()[-1])["step"] == 3
