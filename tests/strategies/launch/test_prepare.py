"""Refusals of `dsplan run` before it starts a process, each in one line."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.device import Device
from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.probe import Gpu, Host, Machine, Software
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.request import WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Plan
from planner.types.plan_io import save_plan
from strategies.launch import prepare as prepare_module
from strategies.launch.options import DEFAULT_SUPERVISION, RequestedSupervision, parse_kernels
from strategies.launch.prepare import Launch, RunRequest, prepare
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import ATTEMPT_OPTIONS_FILE, CLAIM_FILE, write_json
from strategies.run_directory.request import DecidedDevice, PlanRequest, RequestedDegrees, RequestedMethod
from strategies.variables import REQUEST

CPU = Device(name="cpu", vendor="cpu", architecture="x86")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(host=Host(system="Linux"), software=Software(python="3.11"))
    monkeypatch.setattr(prepare_module, "probe", lambda: machine)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import dsplan\ndsplan.initialize(None)")
    return path


def _plan(gpus: int = 2, **configuration: object) -> Plan:
    cluster = resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB", gpus=gpus))
    options = WorkOptions(seq_len=128, global_batch=8 * gpus)
    plan = recommend(make_request(find_model("opt-125m"), cluster, options, strategies=("ddp",))).plans[0]
    return replace(plan, configuration=replace(plan.configuration, **configuration))


def _plan_file(tmp_path: Path, plan: Plan) -> PlanRequest:
    path = tmp_path / "plan.yaml"
    save_plan(plan, path)
    return PlanRequest(plan_file=str(path))


def _refusal(request: RunRequest) -> str:
    with pytest.raises(DsplanError) as caught:
        prepare(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_processes_on_a_machine_without_a_gpu(script: Path) -> None:
    launch = prepare(RunRequest(script=script, arguments=("--x", "1")))
    assert (launch.spec.processes, launch.spec.arguments, launch.plan) == (2, ("--x", "1"), None)
    assert launch.spec.environment["DSPLAN_RUN_DIR"] == launch.spec.run_directory
    assert PlanRequest.of(launch.spec.environment) == PlanRequest(device=DecidedDevice(gpus=0))


def test_a_plan_decides_the_number_of_processes(script: Path, tmp_path: Path) -> None:
    launch = prepare(RunRequest(script=script, plan=_plan_file(tmp_path, _plan(gpus=4))))
    assert launch.spec.processes == 4
    assert PlanRequest.of(launch.spec.environment).plan_file == str(tmp_path / "plan.yaml")


def test_a_plan_whose_parts_do_not_go_together(script: Path, tmp_path: Path) -> None:
    plan = _plan_file(tmp_path, _plan(pp_schedule="gpipe"))
    assert "plan.yaml: schedule gpipe is for a pipeline" in _refusal(RunRequest(script=script, plan=plan))


def _handed(request: RunRequest) -> PlanRequest:
    """Return what the ranks of a run are handed of its flags."""
    return _flags(prepare(request))


def _flags(launch: Launch) -> PlanRequest:
    return replace(PlanRequest.of(launch.spec.environment), device=None)


def test_degrees_go_to_the_ranks_and_with_a_resumed_run(script: Path, tmp_path: Path) -> None:
    degrees = RequestedDegrees(tp=2, pp=2, pp_schedule="gpipe")
    request = RunRequest(script=script, processes=4, plan=PlanRequest(degrees=degrees), run_directory=tmp_path / "run")
    launch = prepare(request)
    launch.spec.save()
    assert PlanRequest.of(launch.spec.environment).degrees == degrees
    assert _handed(RunRequest(resume=tmp_path / "run")).degrees == degrees
    others = PlanRequest(degrees=RequestedDegrees(cp=2))
    assert _handed(RunRequest(resume=tmp_path / "run", plan=others, processes=3)) == others
    ddp = PlanRequest(strategy="ddp")
    assert _handed(RunRequest(resume=tmp_path / "run", plan=ddp)) == ddp
    assert _handed(RunRequest(script=script)) == PlanRequest()


def test_a_run_of_an_earlier_release_keeps_what_it_was_asked(script: Path, tmp_path: Path) -> None:
    """Its `launch.json` has a variable for each part of the request, and its options a copy of the supervision."""
    spec = prepare(RunRequest(script=script, run_directory=tmp_path / "run")).spec
    own = {name: value for name, value in spec.environment.items() if name != REQUEST}
    earlier = {
        "DSPLAN_STRATEGY": "fsdp",
        "DSPLAN_BACKEND": "torch",
        "DSPLAN_PARALLEL": '{"tp": 2, "sequence_parallel": true}',
        "DSPLAN_METHOD": '{"method": "lora", "lora_rank": 4}',
        "DSPLAN_KERNELS": '{"all": "auto"}',
    }
    replace(spec, environment={**own, **earlier}).save()
    assert _handed(RunRequest(resume=tmp_path / "run")) == PlanRequest(
        strategy="fsdp",
        backend="torch",
        degrees=RequestedDegrees(tp=2, sequence_parallel=True),
        method=RequestedMethod(method="lora", lora_rank=4),
        kernels={"all": "auto"},
    )
    supervision = {"checkpoint_directory": "c", "checkpoint_minutes": None, "checkpoint_steps": 5}
    options = {"attempt": 2, "reached": 7, **supervision, "hang_seconds": 60.0, "tunes": False, "since": 1}
    write_json(tmp_path / "run" / ATTEMPT_OPTIONS_FILE, options)
    read = AttemptOptions.load(tmp_path / "run")
    assert read == AttemptOptions(attempt=2, reached=7, since=1, supervision=spec.supervision)
    write_json(tmp_path / "run" / ATTEMPT_OPTIONS_FILE, {**options, "attempts": 1})
    with pytest.raises(BrokenFile, match=r"orders\.json: not a run of this version of dsplan \(attempts is not a key"):
        AttemptOptions.load(tmp_path / "run")


def test_degrees_that_do_not_divide_the_processes(script: Path, tmp_path: Path) -> None:
    request = RunRequest(script=script, processes=4, plan=PlanRequest(degrees=RequestedDegrees(tp=2, pp=3)))
    assert _refusal(request) == "--tp 2 x --pp 3 = 6 does not divide the 4 processes; use --nproc 6, or another degree"
    request = RunRequest(script=script, processes=4, plan=PlanRequest(degrees=RequestedDegrees(tp=3)))
    assert _refusal(request) == "--tp 3 does not divide the 4 processes; use --nproc 6, or another degree"
    plan = _plan_file(tmp_path, _plan())
    request = RunRequest(script=script, plan=replace(plan, degrees=RequestedDegrees(pp_schedule="1f1b")))
    assert _refusal(request) == "--plan and --pp-schedule cannot both decide; leave one out"


def test_what_is_trained_and_whose_kernels_run_are_handed_on_and_kept(script: Path, tmp_path: Path) -> None:
    method, kernels = RequestedMethod(method="lora", lora_rank=4), parse_kernels("rms_norm=liger,auto")
    request = PlanRequest(method=method, kernels=kernels)
    launch = prepare(RunRequest(script=script, plan=request, run_directory=tmp_path / "run"))
    launch.spec.save()
    assert _flags(launch) == request
    assert request.kernels == {"rms_norm": "liger", "all": "auto"}
    assert _handed(RunRequest(resume=tmp_path / "run")) == request
    plan = replace(_plan_file(tmp_path, _plan()), method=method)
    assert "--plan and --method cannot" in _refusal(RunRequest(script=script, plan=plan))
    alone = PlanRequest(method=RequestedMethod(lora_rank=4))
    assert "--lora-rank is for --method lora" in _refusal(RunRequest(script=script, plan=alone))
    both = PlanRequest(method=RequestedMethod(method="dora", train_only="head"))
    assert "--train-only says what --method dora says too" in _refusal(RunRequest(script=script, plan=both))
    with pytest.raises(ContradictoryRequest, match="--kernels 'liger,auto' is read as NAME, or as KERNEL=NAME"):
        parse_kernels("liger,auto")


def test_a_plan_for_more_processes_than_asked(script: Path, tmp_path: Path) -> None:
    plan = _plan_file(tmp_path, _plan())
    assert "--nproc 3 contradicts" in _refusal(RunRequest(script=script, plan=plan, processes=3))


def test_a_plan_over_several_nodes(script: Path, tmp_path: Path) -> None:
    plan = _plan()
    several = replace(plan, cluster={**plan.cluster, "nodes": 2, "gpus_per_node": 1})
    assert "spans 2 nodes" in _refusal(RunRequest(script=script, plan=_plan_file(tmp_path, several)))


def test_more_processes_than_gpus(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "usable_gpus", (Gpu(index=0, name="H100", free_bytes=1),))
    assert "this machine has 1; use --nproc 1 or fewer" in _refusal(RunRequest(script=script, processes=2))


@pytest.mark.parametrize("processes", [0, -1, 100_000])
def test_a_number_of_processes_that_is_none(processes: int, script: Path) -> None:
    assert "use 1 to 1024" in _refusal(RunRequest(script=script, processes=processes))


def test_plan_and_strategy_together(script: Path, tmp_path: Path) -> None:
    request = RunRequest(script=script, plan=replace(_plan_file(tmp_path, _plan()), strategy="ddp"))
    assert "leave one out" in _refusal(request)


def test_an_unknown_strategy_offers_the_known(script: Path) -> None:
    assert "nearest: zero2" in _refusal(RunRequest(script=script, plan=PlanRequest(strategy="zero22")))


def test_a_backend(script: Path, tmp_path: Path) -> None:
    assert "one of torch, deepspeed, native" in _refusal(RunRequest(script=script, plan=PlanRequest(backend="nativ")))
    contradiction = _refusal(RunRequest(script=script, plan=PlanRequest(strategy="zero3", backend="torch")))
    assert contradiction == "--backend torch does not run zero3; deepspeed or native does, or leave one of them out"
    plan = _plan_file(tmp_path, _plan())
    assert "--plan and --backend cannot both decide" in _refusal(
        RunRequest(script=script, plan=replace(plan, backend="torch"))
    )
    launch = prepare(RunRequest(script=script, plan=PlanRequest(backend="native"), run_directory=tmp_path / "run"))
    launch.spec.save()
    assert PlanRequest.of(launch.spec.environment).backend == "native"
    assert _handed(RunRequest(resume=tmp_path / "run")).backend == "native"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"x = (", "line 1"),
        (b"\x00", "not Python"),
        (b"# coding: nonsense\n", "not Python"),
        (b"\xff\xfe", "not Python"),
    ],
)
def test_what_is_not_python_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    assert says in _refusal(RunRequest(script=path))


def test_missing_script_and_folder(tmp_path: Path) -> None:
    assert "no such script" in _refusal(RunRequest(script=tmp_path / "nope.py"))
    assert "is not a file" in _refusal(RunRequest(script=tmp_path))


def test_no_torch(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    assert "torch is not installed" in _refusal(RunRequest(script=script))


def test_a_run_directory_is_not_used_twice(script: Path, tmp_path: Path) -> None:
    prepare(RunRequest(script=script, run_directory=tmp_path / "run")).spec.save()
    assert "holds an earlier run" in _refusal(RunRequest(script=script, run_directory=tmp_path / "run"))


def test_a_run_directory_that_cannot_be_made(script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--run-dir" in _refusal(RunRequest(script=script, run_directory=tmp_path / "file" / "run"))


def test_a_checkpoint_directory_that_cannot_be_made(script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    supervision = RequestedSupervision(checkpoint_dir=tmp_path / "file" / "saves")
    assert "--checkpoint-dir" in _refusal(RunRequest(script=script, supervision=supervision))


def test_times_that_are_no_numbers() -> None:
    with pytest.raises(DsplanError, match="--hang-minutes is nan; give a number"):
        RequestedSupervision(hang_minutes=float("nan")).over(DEFAULT_SUPERVISION)


def test_a_run_to_resume_that_is_not_there(tmp_path: Path) -> None:
    assert "no such directory" in _refusal(RunRequest(resume=tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    assert "not a directory" in _refusal(RunRequest(resume=tmp_path / "file"))
    assert "holds no run to resume" in _refusal(RunRequest(resume=tmp_path))


def test_where_to_resume_from(script: Path, tmp_path: Path) -> None:
    assert "add --resume DIR" in _refusal(RunRequest(script=script, resume_from="start"))
    launch = prepare(RunRequest(script=script, run_directory=tmp_path / "run"))
    launch.spec.save()
    request = RunRequest(resume=tmp_path / "run", resume_from="start")
    again = prepare(request)
    assert (again.resume_from, again.spec.run_id) == ("start", launch.spec.run_id)
    named = replace(request, resume_from=str(tmp_path / "step-00000004"))
    assert "is no checkpoint (state.json or trainer_state.json is not there)" in _refusal(named)
    write_json(tmp_path / "run" / CLAIM_FILE, {"kind": "dsplan"})
    assert "is no checkpoint (state.json is not there); name one, or start" in _refusal(named)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "state.json").write_text("{}")
    assert prepare(named).resume_from == str(tmp_path / "step-00000004")
    write_json(tmp_path / "run" / CLAIM_FILE, {"kind": "accelerate"})
    assert "dsplan loads no checkpoint for" in _refusal(request)
    assert "dsplan keeps no checkpoint of it" in prepare(RunRequest(resume=tmp_path / "run")).notices[-1]


def test_new_run_directories_differ(script: Path) -> None:
    directories = {prepare(RunRequest(script=script)).spec.run_directory for _ in range(3)}
    assert len(directories) == 3
