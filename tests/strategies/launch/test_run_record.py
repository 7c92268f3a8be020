"""A run in an object store, here fsspec's in memory: resumed by its address, held by one command, without secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hardware_db.errors import DsplanError
from hardware_db.probe import Host, Machine, Software
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.search.request import WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan_io import load_plan, save_plan
from strategies.checkpoint import object_store
from strategies.checkpoint.object_store import ObjectPath
from strategies.launch import prepare as prepare_module
from strategies.launch import run_hold, run_record
from strategies.launch.grace_period import StopRequests
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.prepare import Launch, RunRequest, prepare
from strategies.launch.run_hold import HeldElsewhere, Hold, Holder, newest_holder
from strategies.launch.run_record import RecordKeeper, RunRecord, record_folder
from strategies.launch.secret_values import is_secret
from strategies.launch.state import RunState
from strategies.run_directory.journal import Journal, read_journal
from strategies.run_directory.request import PlanRequest
from strategies.run_directory.spec import LaunchSpec, Placement, ScriptStart
from strategies.supervision import lineage

ADDRESS = ObjectPath("memory://bucket/team")
FOLDER = ADDRESS / "runs" / "abc"
SECRET = "hf_0123456789abcdef"


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket, on a machine without GPUs; people need not wait as long as in life."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = ["", "/bucket"]
    machine = Machine(host=Host(system="Linux"), software=Software(python="3.11"))
    monkeypatch.setattr(prepare_module, "probe", lambda: machine)
    monkeypatch.setattr(object_store, "sleep", lambda seconds: None)
    monkeypatch.setattr(run_hold, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_record, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_record, "_LEAST_SECONDS", 0.0)
    yield
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    """A launch in a directory of its own, with a script and checkpoints in the bucket."""
    directory = tmp_path / "run"
    directory.mkdir()
    (tmp_path / "train.py").write_text("print()")
    launch = LaunchSpec(
        script=str(tmp_path / "train.py"),
        arguments=("--lr", "0.1"),
        processes=2,
        run_directory=str(directory),
        supervision=replace(DEFAULT_SUPERVISION, checkpoint_directory=str(ADDRESS)),
        run_id="abc",
    )
    launch.save()
    return launch


def elsewhere(monkeypatch: pytest.MonkeyPatch, *, lost_after: float = 60.0) -> None:
    """Go to another machine, where holders count as gone after some seconds of silence."""
    monkeypatch.setattr(run_hold, "_machine", lambda: "another")
    monkeypatch.setattr(run_hold, "LOST_SECONDS", lost_after)


def take(spec: LaunchSpec) -> Hold:
    return Hold.take(FOLDER, spec.directory, "train.py")


def objects() -> list[str]:
    return sorted(name.removeprefix("/bucket/team/") for name in MemoryFileSystem.store)


def kept(spec: LaunchSpec, body: Callable[[], object] = lambda: None) -> list[str]:
    """Hold a run for as long as it takes to do something, and return what was remarked."""
    keeper = RecordKeeper(spec)
    keeper.take()
    with StopRequests() as requests, keeper.keep(requests):
        body()
    return keeper.remarks()


def refusal(request: RunRequest) -> str:
    with pytest.raises(DsplanError) as caught:
        prepare(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# One at a time.


def test_of_many_commands_at_once_one_has_the_run(spec: LaunchSpec, tmp_path: Path) -> None:
    start, holds, refused = threading.Barrier(8), [], []

    def attempt(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        start.wait()
        try:
            holds.append(Hold.take(FOLDER, directory, "train.py"))
        except HeldElsewhere as problem:
            refused.append(str(problem))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(holds), len(refused)) == (1, 7)
    assert all("is at work on this run; stop it there first" in line for line in refused)


def test_a_machine_that_says_nothing_is_waited_for_and_one_that_does_is_at_work(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = take(spec)
    elsewhere(monkeypatch, lost_after=5.0)
    working = threading.Timer(0.2, first.renew)
    working.start()
    with pytest.raises(HeldElsewhere, match="is at work on this run"):
        take(spec)
    working.join()
    assert "was at work on this run 0 s ago: waiting for another word of it, 5 s at most" in capsys.readouterr().err
    monkeypatch.setattr(run_hold, "LOST_SECONDS", 0.3)
    second = take(spec)
    assert (first.mine.number, second.mine.number) == (1, 2)


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(spec: LaunchSpec) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    first = take(spec)
    gone = replace(first.mine.holder, process=ended.pid)
    (FOLDER / "00000001.json").write_bytes(gone.to_bytes())
    assert take(spec).mine.number == 2
    with pytest.raises(HeldElsewhere, match="is at work on this run"):
        take(spec)


def test_who_was_taken_over_sees_it_and_writes_nothing_more(spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(spec)
    elsewhere(monkeypatch, lost_after=0.0)
    second = take(spec)
    assert second.mine.number == 2
    before = dict(MemoryFileSystem.store)
    first.renew()
    first.release("completed")
    assert first.lost_to == second.mine.holder.host
    assert dict(MemoryFileSystem.store) == before
    second.renew()
    assert not second.lost_to


def test_a_store_without_conditions_lets_two_take_one_number_and_the_first_sees_it(spec: LaunchSpec) -> None:
    first = take(spec)
    usurper = replace(Holder.of_this_process("train.py"), host="other")
    (FOLDER / "00000001.json").write_bytes(usurper.to_bytes())
    first.renew()
    assert first.lost_to == "other"


def test_a_run_that_was_taken_over_ends_here_without_saving(spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_hold, "RENEWAL_SECONDS", 0.05)
    keeper, other = RecordKeeper(spec), replace(Holder.of_this_process("train.py"), host="other")
    keeper.take()
    with StopRequests() as requests, keeper.keep(requests):
        (FOLDER / "00000002.json").write_bytes(other.to_bytes())
        for _ in range(1000):
            if requests.came:
                break
            threading.Event().wait(0.01)
        assert (requests.came, requests.at_once) == (True, True)
        assert requests.superseded.startswith("other has resumed this run (memory://bucket/team/runs/abc)")
    newest = newest_holder(FOLDER)
    assert newest is not None
    assert newest.holder == other


def test_a_directory_whose_run_went_on_elsewhere_says_where(spec: LaunchSpec, tmp_path: Path) -> None:
    kept(spec)
    other = replace(spec, run_directory=str(tmp_path / "other"))
    other.directory.mkdir()
    other.save()
    kept(other)
    with pytest.raises(HeldElsewhere, match=f"the run was resumed on .* since; go on from there: .* --resume {FOLDER}"):
        kept(spec)


# What is kept.


def test_a_record_is_what_resuming_reads(spec: LaunchSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB", gpus=2))
    options = WorkOptions(seq_len=128, global_batch=16)
    plan = recommend(make_request(find_model("opt-125m"), cluster, options, strategies=("ddp",))).plans[0]
    save_plan(plan, tmp_path / "given.yaml")
    request = PlanRequest(plan_file=str(tmp_path / "given.yaml"))
    spec = replace(spec, environment=request.to_variables())

    def work() -> None:
        spec.save()
        RunState(spec, plan, resumes=False).begin_attempt(0)
        Journal(spec.directory).append("attempt", 0, ranks=2, resumes=False, saved=0, since=0, base="")
        checkpoint = lineage.RunCheckpoint(path=f"{ADDRESS}/step-00000006", step=6, run="abc")
        lineage.note(spec.directory, checkpoint)
        Journal(spec.directory).append("saved", 0, step=6, path=checkpoint.path, run="abc")

    assert kept(spec, work) == []
    assert objects() == ["runs/abc/00000001.json", "runs/abc/00000001.run.gz"]
    (tmp_path / "given.yaml").unlink()
    launch = prepare(RunRequest(resume=ADDRESS, run_directory=tmp_path / "again"))
    directory = tmp_path / "again"
    assert launch.spec.directory == directory
    assert launch.resumes
    assert launch.plan == load_plan(directory / "requested-plan.yaml") == plan
    assert launch.spec.run_id == "abc"
    assert launch.spec.arguments == ("--lr", "0.1")
    assert launch.spec.supervision == spec.supervision
    for name in ("orders.json", "plan.yaml", "run.jsonl", "checkpoints.jsonl"):
        assert (directory / name).read_bytes() == (spec.directory / name).read_bytes()
    state = RunState(launch.spec, launch.plan, resumes=True)
    assert (state.first, state.saved, state.course.highest) == (1, 6, 6)
    assert f"{FOLDER}: resumes train.py of" in capsys.readouterr().err
    kept(launch.spec)
    assert objects() == ["runs/abc/00000002.json", "runs/abc/00000002.run.gz"], "of commands before nothing stays"


def test_the_record_follows_the_files_and_a_store_that_fails_stops_nothing(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, gone = MemoryFileSystem.pipe_file, threading.Event()

    def pipe_file(*arguments: Any, **named: Any) -> Any:
        if gone.is_set():
            raise ConnectionError(SECRET)
        return original(*arguments, **named)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    remarks: list[str] = []

    def until(is_so: Callable[[], object]) -> None:
        for _ in range(1000):
            if is_so():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it does not come")

    def rows() -> int:
        with suppress(DsplanError):
            held = newest_holder(FOLDER)
            assert held is not None
            return RunRecord.read(held).files.get("run.jsonl", "").count("\n")
        return -1

    keeper = RecordKeeper(spec)
    keeper.take()
    with StopRequests() as requests, keeper.keep(requests):
        until(lambda: rows() == 0)
        Journal(spec.directory).append("attempt", 0)
        until(lambda: rows() == 1)
        gone.set()
        Journal(spec.directory).append("plan", 0)
        until(lambda: remarks.extend(keeper.remarks()) or remarks)
        gone.clear()
        until(lambda: rows() == 2)
        assert not requests.came
    (line,) = [*remarks, *keeper.remarks()]
    assert "the object store does not answer (ConnectionError)" in line
    assert line.endswith("the run goes on, and its record in the store is behind until then")


def test_killed_at_every_call_the_record_is_whole(spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    kept(spec)
    calls, dies_at = [0], [-1]

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == dies_at[0]:
                raise Killed
            return original(*arguments, **named)

        return call

    for name in ("pipe_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, guarded(getattr(MemoryFileSystem, name)))
    monkeypatch.setattr(Holder, "is_gone", property(lambda holder: True))

    def work(number: int) -> None:
        hold = take(spec)
        Journal(spec.directory).append("attempt", number)
        keeper = RecordKeeper(spec)
        keeper._write(hold)
        hold.release("")

    work(0)
    total, steps = calls[0], 1
    assert total >= 5
    for number in range(1, total + 1):
        calls[0], dies_at[0] = 0, number
        with suppress(Killed):
            work(number)
        held = newest_holder(FOLDER)
        assert held is not None
        rows = RunRecord.read(held).files["run.jsonl"].count("\n")
        assert steps <= rows <= len(read_journal(spec.directory))
        steps = rows


def test_no_secret_is_in_a_record_and_a_resumed_run_has_its_own(
    spec: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f'{SECRET}"/+')
    monkeypatch.setenv("WANDB_API_KEY", "wandb-of-this-machine")
    variables = {"WANDB_API_KEY": SECRET, "PROXY": f"http://me:{SECRET}@host", "EPOCHS": "3"}
    arguments = ("--hub-token", SECRET, "--eos_token", "</s>", f"--db.password={SECRET}", f"url=x://u:{SECRET}@h", "3")
    options = ("-x", f"HF_TOKEN={SECRET}", "--bind-to", "none")
    secret = replace(
        spec,
        arguments=arguments,
        environment=variables,
        start=ScriptStart(variables=variables),
        placement=Placement(launcher="mpi", options=options),
    )
    secret.save()
    Journal(spec.directory).append("ending", 0, kind="failed", reason=f'denied: {SECRET}"/+')
    record = RunRecord.of(secret)
    text = json.dumps(record.files)
    assert SECRET not in text
    assert "wandb-of-this-machine" not in text
    assert "</s>" in text
    kept(secret)
    request = RunRequest(resume=ADDRESS, run_directory=tmp_path / "again")
    missing = refusal(request)
    assert missing.endswith("the run had PROXY set, which is not kept in a store; set it here, and resume again")
    monkeypatch.setenv("PROXY", "http://host")
    assert "the script's arguments had a secret, which is not kept in a store; name them again" in refusal(request)
    request = replace(request, script=Path(spec.script), arguments=("--hub-token", "mine"))
    assert "--launcher-option had a secret" in refusal(request)
    assert not (tmp_path / "again").exists()


def test_variables_that_a_record_has_not_are_this_machines(
    spec: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(replace(spec, start=ScriptStart(variables={"WANDB_API_KEY": SECRET, "EPOCHS": "3"})))
    monkeypatch.setenv("WANDB_API_KEY", "wandb-of-this-machine")
    launch = prepare(RunRequest(resume=ADDRESS, run_directory=tmp_path / "again"))
    assert launch.spec.start.variables == {"WANDB_API_KEY": "wandb-of-this-machine", "EPOCHS": "3"}


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "--hub-token", "api_key", "AWS_ACCESS_KEY_ID", "dbPassword", "client-secret", "authToken"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["--tokenizer", "max_tokens", "eos_token", "PWD", "--key", "TOKEN_FILE", "OMP_NUM_THREADS"]
)
def test_names_of_others(name: str) -> None:
    assert not is_secret(name)


# What is refused, in one line.


def test_what_cannot_be_resumed_by_an_address_is_one_line(spec: LaunchSpec, tmp_path: Path) -> None:
    here = RunRequest(resume=ADDRESS, run_directory=tmp_path / "again")
    assert refusal(here) == f"{ADDRESS}: holds no run to resume; name what --checkpoint-dir named, or a run directory"
    take(spec).release("")
    assert refusal(here) == f"{FOLDER}: the run ended before it had anything to resume; start it again"
    kept(spec)
    Path(spec.script).rename(tmp_path / "moved.py")
    line = f"{FOLDER}: its script {spec.script} is not here; put it there, or name it: dsplan run --resume {ADDRESS}"
    assert refusal(here) == f"{line} SCRIPT ARGUMENTS"
    moved = prepare(replace(here, script=tmp_path / "moved.py"))
    assert moved.script == tmp_path / "moved.py"
    Path(tmp_path / "moved.py").rename(spec.script)
    other = replace(spec, run_id="other")
    kept(other)
    line = refusal(replace(here, run_directory=None))
    assert line.startswith(f"{ADDRESS}: 2 runs there can be resumed; name one: {FOLDER} (train.py of ")
    assert prepare(replace(here, resume=FOLDER, run_directory=tmp_path / "named")).spec.run_id == "abc"
    assert "holds an earlier run; name another --run-dir" in refusal(replace(here, resume=FOLDER))
    Journal(spec.directory).append("end", 0, outcome="completed")
    for each in (spec, other):
        kept(each)
    assert "the run completed, nothing is left to resume" in refusal(here)
    damaged = FOLDER / "00000009.json"
    damaged.write_bytes(b"[" * 10_000)
    assert "is not of this version of dsplan" in refusal(replace(here, resume=FOLDER))


def test_a_changed_script_is_noticed(spec: LaunchSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(spec)
    Path(spec.script).write_text("print(1)")
    assert isinstance(prepare(RunRequest(resume=ADDRESS, run_directory=tmp_path / "again")), Launch)
    assert f"{spec.script} is not as it was when the run began" in capsys.readouterr().err


def test_runs_on_directories_and_of_a_command_on_every_node_have_no_record(spec: LaunchSpec) -> None:
    assert record_folder(spec) == FOLDER
    assert record_folder(replace(spec, supervision=DEFAULT_SUPERVISION)) is None
    nodes = Placement(least_nodes=2, most_nodes=2, rendezvous="a:1")
    assert record_folder(replace(spec, placement=nodes)) is None
    assert record_folder(replace(spec, placement=replace(nodes, launcher="slurm"))) == FOLDER
    kept(replace(spec, supervision=DEFAULT_SUPERVISION))
    assert objects() == []
