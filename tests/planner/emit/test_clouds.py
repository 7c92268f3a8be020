"""Managed jobs of SkyPilot: what a node runs, how it saves, and that SkyPilot's own parser and optimizer take them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import emit
from planner.emit.clouds import ManagedJob, managed_job
from planner.emit.node_command import save_command
from tests.planner.emit.plans import make_plan

JOB = ManagedJob(
    name="run",
    nodes=2,
    words=("--nproc", "8", "--checkpoint-dir", "s3://team/runs/run", "--", "train.py", "two words"),
    resources={"accelerators": "H100:8", "use_spot": True},
    task={"setup": "pip install train", "workdir": "."},
    environment={"DSPLAN_RUN_ID": "run", "DSPLAN_PLAN": "strategy: fsdp\n"},
    stop_seconds=45,
)


def test_a_job_recovers_from_what_saved_and_saves_before_its_nodes_go() -> None:
    document = managed_job(JOB)
    assert (document["name"], document["num_nodes"], document["setup"]) == ("run", 2, "pip install train")
    assert document["resources"] == {
        "accelerators": "H100:8",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75]},
    }
    hook = {"events": ["down", "preemption"], "timeout": 45, "run": save_command("~/.dsplan-run.pid")}
    assert document["config"]["hooks"] == [hook]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("FAILOVER", {"strategy": "FAILOVER", "recover_on_exit_codes": [75]}),
        (
            {"max_restarts_on_errors": 2, "recover_on_exit_codes": 33},
            {"max_restarts_on_errors": 2, "recover_on_exit_codes": [33, 75]},
        ),
        ({"recover_on_exit_codes": [75]}, {"recover_on_exit_codes": [75]}),
    ],
)
def test_a_persons_own_recovery_and_hooks_stay(given: Any, expected: dict[str, Any]) -> None:
    own = {"run": "echo down", "events": ["down"]}
    task = {**JOB.task, "config": {"hooks": [own], "kubernetes": {}}, "envs": {"A": "1"}}
    document = managed_job(replace(JOB, resources={"job_recovery": given}, task=task))
    assert document["resources"]["job_recovery"] == expected
    assert (document["config"]["hooks"][0], "kubernetes" in document["config"]) == (own, True)
    assert document["envs"]["A"] == "1"


def test_nodes_meet_at_the_first_with_directories_of_their_own(tmp_path: Path) -> None:
    command = tmp_path / "dsplan"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    variables = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "HOME": str(tmp_path)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables, **managed_job(JOB)["envs"]}
    words = ["bash", "-c", managed_job(JOB)["run"]]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    directory = tmp_path / "dsplan-runs" / "run"
    node = directory / "node1"
    assert ended[:3] == ["run", "--run-dir", str(node)]
    assert ended[3:9] == [
        "--nodes",
        "2",
        "--rendezvous",
        "10.0.0.7:29400",
        "--checkpoint-dir",
        f"{directory}/checkpoints",
    ]
    assert ended[9:] == ["--plan", f"{node}/requested-plan.yaml", *JOB.words]
    assert int((tmp_path / ".dsplan-run.pid").read_text()) > 0


def test_a_hook_ends_when_the_run_has_saved(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run = 'trap "sleep 0.3; touch saved; exit 75" TERM; touch ready; while :; do sleep 0.05; done'
    with subprocess.Popen(["bash", "-c", run, "dsplan run"], cwd=tmp_path) as process:
        (tmp_path / "process").write_text(str(process.pid))
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        subprocess.run(["sh", "-c", save_command(shlex.quote(str(tmp_path / "process")))], check=True, timeout=20)
        assert saved.exists()
        assert process.wait(timeout=20) == 75


@pytest.mark.parametrize("content", ["", "4194305"])
def test_a_hook_without_a_run_ends_at_once(content: str, tmp_path: Path) -> None:
    (tmp_path / "process").write_text(content)
    ended = subprocess.run(
        ["sh", "-c", save_command(shlex.quote(str(tmp_path / "process")))], capture_output=True, timeout=20
    )
    assert (ended.stdout, ended.stderr) == (b"", b"")


# By SkyPilot itself, without a cloud.


H100 = "\"{'Gpus': [{'Name': 'H100', 'Manufacturer': 'NVIDIA', 'Count': 8, 'MemoryInfo': {'SizeInMiB': 81920}}]}\""
_HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
CATALOGUES = {
    "nebius/vms": f"{_HEAD}\ngpu-h100-sxm_8gpu-128vcpu-1600gb,H100,8,128,1600,23.60,eu-north1,{H100},10.00\n",
    "lambda/vms": f"{_HEAD}\ngpu_8x_h100_sxm5,H100,8,208,1800,31.92,us-east-1,{H100},\n",
    "common/accelerators": "AcceleratorName,Clouds\nH100,\"['Lambda', 'nebius']\"\n",
}
"""Rows of skypilot-org/skypilot-catalog, catalogs/v8: nebius/vms.csv at 0082b043, lambda/vms.csv at 0f407038."""
OPTIMIZES = """
import json, sys
import sky, sky.check, sky.clouds, sky.exceptions, sky.optimizer
clouds = [sky.clouds.Nebius(), sky.clouds.Lambda()]
sky.check.get_cached_enabled_clouds_or_refresh = lambda *given, **named: clouds  # as if all could be reached
found = []
for document in json.load(open(sys.argv[1])):
    task = sky.Task.from_yaml_config(document)
    with sky.Dag() as dag:
        dag.add(task)
    kept = all(r.job_recovery["recover_on_exit_codes"] == [75] and len(r.hooks) == 1 for r in task.resources)
    try:
        sky.optimizer.Optimizer.optimize(dag, quiet=True)
        found.append([str(task.best_resources.cloud), task.best_resources.get_cost(3600), kept])
    except sky.exceptions.ResourcesUnavailableError:
        found.append(["none", 0, kept])
json.dump(found, open(sys.argv[2], "w"))
"""
LAMBDA_FIRST = [
    {"infra": "lambda", "instance_type": "gpu_8x_h100_sxm5", "accelerators": "H100:8"},
    {"accelerators": "H100:8"},
]


@pytest.mark.slow
def test_skypilots_optimizer_rents_the_plans_nodes_at_its_catalogues_prices(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="needs SkyPilot (scripts/ci/launchers.sh installs it beside the environment)")
    expected = [
        ({"accelerators": "H100:8"}, ["Nebius", 23.60]),
        ({"accelerators": "H100:8", "use_spot": True}, ["Nebius", 10.00]),
        ({"ordered": LAMBDA_FIRST}, ["Lambda", 31.92]),
        ({"ordered": LAMBDA_FIRST, "use_spot": True}, ["Nebius", 10.00]),  # Lambda has no spot nodes
        ({"accelerators": "H100:8", "max_hourly_cost": 5}, ["none", 0]),
    ]
    for name, text in CATALOGUES.items():
        table = tmp_path / ".sky" / "catalogs" / "v8" / f"{name}.csv"
        table.parent.mkdir(parents=True)
        table.write_text(text)
    documents = [managed_job(replace(JOB, resources=resources)) for resources, _ in expected]
    question, answer = tmp_path / "asked.json", tmp_path / "answered.json"
    question.write_text(json.dumps(documents))
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [sys.executable, "-c", OPTIMIZES, str(question), str(answer)]
    ended = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert answer.exists(), ended.stdout + ended.stderr
    assert json.loads(answer.read_text()) == [[*rented, True] for _, rented in expected]


@pytest.mark.slow
@pytest.mark.parametrize("emitted", [False, True])
def test_skypilots_parser_takes_tasks(emitted: bool, tmp_path: Path) -> None:
    sky = pytest.importorskip(
        "sky", reason="needs SkyPilot (scripts/ci/launchers.sh installs it beside the environment)"
    )
    if emitted:
        text = emit(make_plan("ddp", gpus=2, vendor="cpu"), "skypilot")["task.yaml"]
    else:
        text = yaml.safe_dump(managed_job(JOB))
    (tmp_path / "task.yaml").write_text(text)
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == (1 if emitted else 2)
    if not emitted:
        (resources,) = task.resources
        assert (resources.use_spot, resources.job_recovery["recover_on_exit_codes"]) == (True, [75])
        assert resources.hooks[0]["timeout"] == 45
        assert sky.Task.from_yaml_config(task.to_yaml_config()).run == task.run
