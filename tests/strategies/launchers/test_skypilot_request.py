"""Flags of `--launcher skypilot`: the nodes that are meant, where they save, and refusals of one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsplan.cli.app import run
from hardware_db.errors import DsplanError
from planner.emit.clouds import ManagedJob
from planner.types.plan_io import save_plan
from strategies.checkpoint.object_store import location
from strategies.launch.options import RequestedPlacement
from strategies.launch.skypilot.request import RequestedTask, price_of, requested_job
from tests.planner.emit.plans import make_plan

IMAGE = "image_id=docker:train"


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def _job(*options: str, request: RequestedTask | None = None, **changes: Any) -> ManagedJob:
    given: dict[str, Any] = {
        "script": Path("train.py"),
        "arguments": ("--lr", "1"),
        "processes": None,
        "plan_file": None,
        "checkpoint_directory": location("s3://team/runs"),
        "grace_seconds": None,
    }
    nodes = changes.pop("nodes", None)
    placement = RequestedPlacement(nodes=nodes, launcher_option=list(options) or None)
    requested = request or RequestedTask(sky_name="trained")
    return requested_job(requested, placement, ("--retries", "3"), **{**given, **changes})


def _plan_file(tmp_path: Path, node_type: str, **changes: Any) -> Path:
    plan = make_plan("fsdp", gpus=16, nodes=2)
    cluster = {**plan.cluster, "device": "H100-SXM5-80GB", "node_type": node_type, **changes}
    save_plan(replace(plan, cluster=cluster), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def test_a_plans_node_type_comes_before_others_with_its_gpus(tmp_path: Path) -> None:
    plan_file = _plan_file(tmp_path, "aws-p5.48xlarge")
    job = _job(IMAGE, plan_file=plan_file)
    first = {"infra": "aws", "instance_type": "p5.48xlarge", "accelerators": "H100:8"}
    assert job.resources == {"image_id": "docker:train", "ordered": [first, {"accelerators": "H100:8"}]}
    assert (job.nodes, job.stop_seconds, set(job.environment)) == (2, 45, {"DSPLAN_RUN_ID", "DSPLAN_PLAN"})
    assert job.words == ("--retries", "3", "--checkpoint-dir", "s3://team/runs/trained", "--", "train.py", "--lr", "1")
    assert price_of(plan_file, 2) == (
        "2 x aws-p5.48xlarge cost 110.08 USD an hour on demand (2026-11-09); spot nodes cost less"
    )


@pytest.mark.parametrize(
    ("options", "node_type", "expected"),
    [
        ((), "dgx-h100", {"accelerators": "H100:8"}),
        (("infra=gcp",), "aws-p5.48xlarge", {"infra": "gcp", "accelerators": "H100:8"}),
        (("accelerators=H200:8",), "aws-p5.48xlarge", {"accelerators": "H200:8"}),
        (("max_hourly_cost=30",), "dgx-h100", {"max_hourly_cost": 30, "accelerators": "H100:8"}),
    ],
)
def test_named_resources_come_before_the_plans(
    options: tuple[str, ...], node_type: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    job = _job(IMAGE, *options, plan_file=_plan_file(tmp_path, node_type))
    assert job.resources == {"image_id": "docker:train", **expected}


def test_a_persons_task_is_kept_and_spot_added(tmp_path: Path) -> None:
    mine = {"setup": "pip install x", "workdir": ".", "resources": {"accelerators": "L4:1"}, "secrets": {"TOKEN": None}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    request = RequestedTask(sky_name="trained", sky_task=tmp_path / "mine.yaml", sky_spot=True)
    job = _job(request=request, processes=1)
    assert job.resources == {"accelerators": "L4:1", "use_spot": True}
    assert job.task == {"setup": "pip install x", "secrets": {"TOKEN": None}, "workdir": str(tmp_path)}
    assert job.words[2:4] == ("--nproc", "1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint_directory": None}, "--checkpoint-dir is missing, and new nodes have new disks; name a bucket"),
        ({"checkpoint_directory": Path("/saved")}, "--checkpoint-dir /saved would go away with a node; name a bucket"),
        ({"script": Path("other.py")}, "other.py: no such script in "),
        ({"processes": None}, "--nproc is missing: the processes of each node, one per GPU"),
        ({"nodes": "1:3"}, "--nodes 1:3: a job has a fixed number of nodes; give one number"),
    ],
)
def test_what_is_missing_is_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DsplanError) as caught:
        _job(IMAGE, "accelerators=H100:8", **{"processes": 8, **changes})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing says which nodes are meant; name their GPUs with --launcher-option accelerators=H100:8"),
        (("accelerators=H100:8",), "nothing says how torch and dsplan come to the nodes; name an image"),
        (("cpus={2",), "--launcher-option 'cpus={2': the value is not YAML"),
        (("H100:8",), "--launcher-option 'H100:8' is no resource of SkyPilot; write one as accelerators=H100:8"),
    ],
)
def test_nodes_that_are_not_described_are_one_line(options: tuple[str, ...], says: str) -> None:
    with pytest.raises(DsplanError) as caught:
        _job(*options, processes=8)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: torchrun train.py", "`run` is set by dsplan run; leave it out"),
        ("[1", "is not YAML: "),
        ("just words", "is no task of SkyPilot"),
        ("file_mounts: /saved", "`file_mounts` is no mapping"),
        ("config: {hooks: down}", "`config.hooks` is no list"),
        ("setup: x\nresources: {job_recovery: 5}", "job_recovery is neither a strategy's name nor a mapping"),
    ],
)
def test_a_task_that_cannot_be_taken_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(DsplanError) as caught:
        _job(request=RequestedTask(sky_task=tmp_path / "mine.yaml"), processes=1)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mounted_bucket_keeps_checkpoints(tmp_path: Path) -> None:
    mine = {"setup": "x", "workdir": ".", "file_mounts": {"/saved": {"source": "s3://team"}, "/data": "s3://data"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    request = RequestedTask(sky_name="trained", sky_task=tmp_path / "mine.yaml")
    job = _job("cpus=2+", request=request, processes=1, checkpoint_directory=Path("/saved/runs"))
    assert "/saved/runs/trained" in job.words
    with pytest.raises(DsplanError, match="would go away with a node"):
        _job("cpus=2+", request=request, processes=1, checkpoint_directory=Path("/data/runs"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--sky-spot", "train.py"), "--sky-spot is for --launcher skypilot; name that, or leave it out"),
        (("run", "--detach", "train.py"), "--detach is for --launcher kubernetes or skypilot; name one"),
        (
            ("run", "--launcher", "skypilot", "--kube-image", "x", "train.py"),
            "--kube-image is for --launcher kubernetes",
        ),
        (("run", "--launcher", "skypilot"), "SCRIPT is missing; name it as the nodes have it"),
        (
            ("run", "--launcher", "skypilot", "--run-dir", "x", "train.py"),
            "--run-dir: a run's directory is on its nodes",
        ),
        (("run", "--launcher", "skypilot", "--resume", "x", "--sky-name", "y"), "--sky-name belongs to the job"),
        (("run", "--launcher", "skypilot", "--resume", "x", "--retries", "3"), "--retries: there --resume resumes"),
        (("watch", "--launcher", "skypilot"), "of jobs one is watched; give the name that dsplan run printed alone"),
        (
            ("watch", "x", "--launcher", "skypilot", "--kube-namespace", "n"),
            "--kube-namespace and --kube-context are for",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(DsplanError) as caught:
        run(words)
    assert str(caught.value).startswith(says)


def test_what_to_install_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.launch.skypilot.service.find_spec", lambda name: None)
    with pytest.raises(DsplanError, match=r"SkyPilot is not installed here; pip install 'skypilot>=0\.14\.1'"):
        run(("watch", "trained", "--launcher", "skypilot"))
