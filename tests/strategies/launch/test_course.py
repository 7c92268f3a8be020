"""The records that a supervisor keeps of a run: steps and times, the journal, its files, and how to resume it."""

from __future__ import annotations

import fcntl
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from strategies.launch.attempt import OutputLine, RunFiles
from strategies.launch.options import DEFAULT_SUPERVISION, RequestedPlacement, RequestedSupervision
from strategies.launch.prepare import RunRequest, prepare
from strategies.launch.run_lock import RunLock, is_held
from strategies.launch.state import Course
from strategies.run_directory.files import LOCK_FILE
from strategies.run_directory.journal import Journal, read_journal
from strategies.run_directory.request import PlanRequest
from strategies.run_directory.spec import LaunchSpec, Placement


def test_a_restart_costs_the_time_until_the_run_is_where_it_was() -> None:
    course = Course()
    course.begin(0.0)
    for step in range(1, 14):
        assert course.reached(step, 10.0 + step) is None
    assert (course.highest, course.progressed) == (13, True)
    course.begin(30.0)
    assert course.reached(11, 40.0) == 40.0 - 21.0
    assert course.reached(12, 41.0) is None
    assert (course.first, course.last, course.highest, course.progressed) == (11, 12, 13, False)


def test_a_restart_behind_the_last_step_and_one_before_the_first() -> None:
    course = Course()
    course.begin(0.0)
    course.begin(5.0)
    assert course.reached(1, 7.0) == 5.0
    course.begin(8.0)
    assert course.reached(2, 10.0) == 3.0


def test_a_run_gone_on_with_elsewhere_does_not_know() -> None:
    course = Course(20)
    course.begin(0.0)
    course.begin(5.0)
    assert course.reached(11, 7.0) is None
    assert not course.progressed


def test_a_checkpoint_of_a_step_that_was_done_before_is_progress() -> None:
    course = Course(20)
    course.begin(0.0)
    course.saved(10)
    course.begin(1.0)
    course.saved(10)
    assert not course.progressed
    course.saved(15)
    assert course.progressed


def test_the_journal_is_read_up_to_a_line_cut_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("attempt", 0, ranks=2)
    journal.append("end", 0, outcome="failed")
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"event": "att')
    first, second = read_journal(tmp_path)
    assert (first["event"], first["ranks"], second["outcome"]) == ("attempt", 2, "failed")


def _row(step: int) -> str:
    return json.dumps({"event": "step", "global_step": step}) + "\n"


def test_files_are_followed_from_here_on_whoever_is_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "rank0.stderr.log").write_text("old\n")
    (tmp_path / "metrics-rank0.jsonl").write_text(_row(1))
    files = RunFiles(tmp_path)
    assert list(files.news()) == []
    (tmp_path / "metrics-rank3.jsonl").write_text(_row(2))
    (tmp_path / "rank3.stdout.log").write_text("not shown\n")
    assert list(files.news()) == [{"event": "step", "global_step": 2}]
    files.begin_attempt()
    with (tmp_path / "metrics-rank0.jsonl").open("a") as file:
        file.write(_row(3))
    with (tmp_path / "rank0.stderr.log").open("a") as log:
        log.write("new\ncut")
    with (tmp_path / "metrics-rank3.jsonl").open("a") as file:
        file.write(_row(3))
    line = OutputLine(rank=0, stream="stderr", text="new")
    assert list(files.news()) == [{"event": "step", "global_step": 3}, line]
    assert list(files.news(final=True)) == [OutputLine(rank=0, stream="stderr", text="cut")]


def test_what_all_ranks_refuse_alike_is_shown_once_in_an_attempt(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for rank in range(3):
        (tmp_path / f"rank{rank}.stderr.log").write_text(f"error: nothing is left\nwarning of all\nerror: {rank % 2}\n")
    shown = [(line.rank, line.text) for line in files.news() if isinstance(line, OutputLine)]
    same = "warning of all"
    assert shown == [(0, "error: nothing is left"), (0, same), (0, "error: 0"), (1, same), (1, "error: 1"), (2, same)]
    files.begin_attempt()
    with (tmp_path / "rank2.stderr.log").open("a") as log:
        log.write("error: nothing is left\n")
    assert [line.rank for line in files.news() if isinstance(line, OutputLine)] == [2]


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(DsplanError, match="another dsplan run"), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


def test_who_looks_whether_a_run_is_held_keeps_none_from_beginning(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        assert is_held(tmp_path)
    look = (tmp_path / LOCK_FILE).open("rb")
    fcntl.flock(look.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    threading.Timer(0.2, look.close).start()
    with RunLock(tmp_path):
        assert look.closed


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import dsplan\ndsplan.initialize(None)")
    return path


def test_a_resumed_run_keeps_what_it_was_asked_and_takes_what_is_asked_now(script: Path, tmp_path: Path) -> None:
    request = RunRequest(
        script=script,
        arguments=("--x",),
        plan=PlanRequest(strategy="ddp"),
        processes=1,
        run_directory=tmp_path / "run",
        placement=RequestedPlacement(launcher="mpi", launcher_option=("--a", "--b")),
        supervision=RequestedSupervision(retries=7, hang_minutes=2),
    )
    spec = prepare(request).spec
    spec.save()
    assert LaunchSpec.load(spec.path) == spec
    launch = prepare(RunRequest(resume=tmp_path / "run", supervision=RequestedSupervision(retries=1)))
    assert launch.resumes
    assert launch.spec.supervision == replace(DEFAULT_SUPERVISION, retries=1, hang_seconds=120)
    assert launch.spec.placement == Placement(launcher="mpi", options=("--a", "--b"))
    assert (launch.spec.script, launch.spec.arguments, launch.spec.processes) == (spec.script, ("--x",), 1)
    assert launch.spec.environment == spec.environment
    again = prepare(
        RunRequest(resume=tmp_path / "run", script=script, plan=PlanRequest(strategy="fsdp"), processes=2)
    ).spec
    assert (again.arguments, PlanRequest.of(again.environment).strategy, again.processes) == ((), "fsdp", 2)


def test_runs_that_cannot_be_gone_on_with(script: Path, tmp_path: Path) -> None:
    with pytest.raises(DsplanError, match="holds no run"):
        prepare(RunRequest(resume=tmp_path))
    spec = prepare(RunRequest(script=script, run_directory=tmp_path / "run")).spec
    spec.save()
    with pytest.raises(DsplanError, match="leave --run-dir out"):
        prepare(RunRequest(resume=tmp_path / "run", run_directory=tmp_path / "run"))
    Journal(spec.directory).append("end", 0, outcome="completed")
    with pytest.raises(DsplanError, match="the run completed"):
        prepare(RunRequest(resume=tmp_path / "run"))
    with pytest.raises(DsplanError, match="SCRIPT is missing"):
        prepare(RunRequest())


SPEC = {"script": "a", "processes": 1, "run_directory": "b", "supervision": asdict(DEFAULT_SUPERVISION)}


def _supervised(**values: object) -> str:
    return json.dumps({**SPEC, "supervision": {**asdict(DEFAULT_SUPERVISION), **values}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "maximum recursion depth"),
        ("[]", "line is []; it must be an object"),
        ("{}", "script is missing"),
        (
            _supervised(retries="many"),
            "supervision.retries is 'many'; it must be a whole",
        ),
        (json.dumps({**SPEC, "placement": {"launcher": "pbs"}}), "placement.launcher 'pbs' is not one of local, slurm"),
        (
            _supervised(old=1),
            "supervision.old is not a key; the keys are retries",
        ),
    ],
)
def test_a_run_of_another_version(text: str, problem: str, script: Path, tmp_path: Path) -> None:
    spec = prepare(RunRequest(script=script, run_directory=tmp_path / "run")).spec
    spec.path.write_text(text)
    with pytest.raises(DsplanError) as refused:
        prepare(RunRequest(resume=tmp_path / "run"))
    assert str(refused.value).startswith(f"{spec.path}: not a run of this version of dsplan ({problem}")
    assert str(refused.value).endswith("); start a new one")
    assert len(str(refused.value).splitlines()) == 1


def test_a_run_is_gone_on_with_from_another_directory(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(RunRequest(script=Path(script.name), run_directory=tmp_path / "run")).spec.save()
    monkeypatch.chdir("/")
    assert prepare(RunRequest(resume=tmp_path / "run")).spec.script == str(script.resolve())


@pytest.mark.parametrize(("text", "nodes"), [("4", (4, 4)), ("2:8", (2, 8))])
def test_nodes(text: str, nodes: tuple[int, int]) -> None:
    placement = RequestedPlacement(nodes=text).over(Placement())
    assert (placement.least_nodes, placement.most_nodes) == nodes
    assert placement.is_elastic == (nodes[0] != nodes[1])


@pytest.mark.parametrize("text", ["0", "3:2", "two", "1:2:3", "-1", "9999999"])
def test_no_number_of_nodes(text: str) -> None:
    with pytest.raises(DsplanError, match="no number of nodes"):
        RequestedPlacement(nodes=text).over(Placement())


@pytest.mark.parametrize("text", ["node0", "node0:", ":29400", "node0:99999", "node0:x"])
def test_no_address(text: str) -> None:
    with pytest.raises(DsplanError, match="write HOST:PORT"):
        RequestedPlacement(rendezvous=text).over(Placement())


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (RequestedPlacement(nodes="2"), "--nodes 2 needs --rendezvous"),
        (RequestedPlacement(rendezvous="node0:29400"), "add --nodes"),
        (RequestedPlacement(nodes="2", rendezvous="node0:29400"), "need --checkpoint-dir"),
        (RequestedPlacement(nodes="1:2", launcher="mpi"), "give --launcher mpi one number"),
        (RequestedPlacement(launcher="slurm", rendezvous="node0:29400"), "--rendezvous is for --launcher local or"),
        (RequestedPlacement(node_rank=1), "--node-rank is for --launcher deepspeed or accelerate"),
        (RequestedPlacement(launcher_option=("-x",)), "--launcher-option is for"),
    ],
)
def test_placements_that_do_not_fit_together(placement: RequestedPlacement, words: str, script: Path) -> None:
    with pytest.raises(DsplanError, match=words):
        prepare(RunRequest(script=script, placement=placement))


def test_another_launcher_is_not_told_what_the_earlier_one_was(script: Path, tmp_path: Path) -> None:
    placement = RequestedPlacement(launcher="mpi", nodes="2", launcher_option=("-x",))
    prepare(RunRequest(script=script, run_directory=tmp_path / "run", placement=placement)).spec.save()
    resume = RunRequest(resume=tmp_path / "run", placement=RequestedPlacement(launcher="local"))
    assert prepare(resume).spec.placement == Placement()


def test_when_to_save() -> None:
    assert RequestedSupervision().over(DEFAULT_SUPERVISION).checkpoint_minutes == 10
    by_steps = RequestedSupervision(checkpoint_steps=5).over(DEFAULT_SUPERVISION)
    assert (by_steps.checkpoint_steps, by_steps.checkpoint_minutes) == (5, None)
    both = RequestedSupervision(checkpoint_steps=5, checkpoint_minutes=2.0).over(DEFAULT_SUPERVISION)
    assert (both.checkpoint_steps, both.checkpoint_minutes) == (5, 2.0)
    assert RequestedSupervision(checkpoint_minutes=0.0).over(DEFAULT_SUPERVISION).checkpoint_minutes is None
