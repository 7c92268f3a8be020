"""The scripts for DeepSpeed's launcher, Open MPI, SLURM and Kubernetes: run by what reads them where that is here."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import emit
from planner.types.plan import Plan
from tests.planner.emit.consumers import launch, write
from tests.planner.emit.plans import make_plan

SCRIPT = str(Path(__file__).parent / "launched_rank.py")


def expected(ranks: int) -> list[dict[str, Any]]:
    total = ranks * (ranks + 1) / 2
    same = {"arguments": ["--text", "two words"], "world_size": ranks, "local_world_size": ranks, "total": total}
    return [{"rank": rank, "local_rank": rank, **same} for rank in range(ranks)]


def shell_scripts(plan: Plan) -> dict[str, str]:
    files: dict[str, str] = {}
    for format in ("deepspeed", "torchrun", "slurm", "mpi"):
        files |= {name: text for name, text in emit(plan, format).items() if name.endswith(".sh")}
    return files


@pytest.mark.slow
def test_deepspeeds_launcher_starts_the_ranks(tmp_path: Path) -> None:
    write(emit(make_plan("zero2", gpus=2, vendor="cpu"), "deepspeed"), tmp_path)
    ranks = launch(["bash", "deepspeed.sh", SCRIPT, "--text", "two words"], directory=tmp_path)
    assert ranks == expected(2)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI (openmpi-bin)")
@pytest.mark.slow
def test_open_mpi_starts_the_ranks(tmp_path: Path) -> None:
    write(emit(make_plan("ddp", gpus=4, vendor="cpu"), "mpi"), tmp_path)
    # More ranks than cores, and as root where the tests run so.
    allowances = "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    command = ["env", *allowances.split(), "bash", "mpirun.sh", SCRIPT, "--text", "two words"]
    assert launch(command, directory=tmp_path) == expected(4)


@pytest.mark.parametrize(("gpus", "nodes"), [(2, 1), (16, 2)])
def test_scripts_are_shell(gpus: int, nodes: int, tmp_path: Path) -> None:
    scripts = shell_scripts(make_plan("zero3", gpus=gpus, nodes=nodes))
    assert sorted(scripts) == ["deepspeed.sh", "mpirun.sh", "slurm.sh", "torchrun.sh"]
    write(scripts, tmp_path)
    for name in scripts:
        checked = subprocess.run(["bash", "-n", name], cwd=tmp_path, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("script", "variable"),
    [*product(("deepspeed.sh", "mpirun.sh"), ("HOSTFILE", "MASTER_ADDR"))],
)
def test_several_nodes_ask_for_what_they_need(script: str, variable: str, tmp_path: Path) -> None:
    write(shell_scripts(make_plan("zero3", gpus=16, nodes=2)), tmp_path)
    given = {"PATH": "/usr/bin:/bin", "HOSTFILE": "hosts", "MASTER_ADDR": "node0"}
    del given[variable]
    process = subprocess.run(["bash", script, "train.py"], cwd=tmp_path, capture_output=True, text=True, env=given)
    assert process.returncode != 0
    assert f"set {variable} to" in process.stderr


def test_a_batch_script_asks_for_the_plans_nodes_and_gpus() -> None:
    text = emit(make_plan("fsdp", gpus=16, nodes=2), "slurm")["slurm.sh"]
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"):
        assert f"#SBATCH {line}\n" in text
    assert "--launcher slurm --nodes 2" in text
    _, _, body = text.partition("pipefail")
    assert "#SBATCH" not in (body or "#SBATCH"), "SLURM reads no directive after the first command"
    assert "gpus" not in emit(make_plan("ddp", gpus=2, vendor="cpu"), "slurm")["slurm.sh"]


@pytest.mark.parametrize(
    ("vendor", "resource"), [("nvidia", "nvidia.com/gpu"), ("amd", "amd.com/gpu"), ("cpu", None), ("apple", None)]
)
def test_a_train_job_asks_for_the_plans_nodes_and_gpus(vendor: str, resource: str | None) -> None:
    job = yaml.safe_load(emit(make_plan("fsdp", gpus=16, nodes=2, vendor=vendor), "kubernetes")["trainjob.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer.get("resourcesPerNode") == (resource and {"limits": {resource: 8}})


def test_tasks_for_clouds_ask_for_the_plans_nodes_and_gpus() -> None:
    plan = make_plan("fsdp", gpus=16, nodes=2)
    plan = replace(plan, cluster={**plan.cluster, "device": "H100-SXM5-80GB"})
    sky, of_dstack = (yaml.safe_load(next(iter(emit(plan, name).values()))) for name in ("skypilot", "dstack"))
    assert (sky["num_nodes"], sky["resources"]) == (2, {"accelerators": "H100:8"})
    assert (of_dstack["nodes"], of_dstack["resources"]) == (2, {"gpu": "H100:80GB:8"})
    on_cpu = make_plan("ddp", gpus=2, vendor="cpu")
    for name in ("skypilot", "dstack"):
        assert "resources" not in yaml.safe_load(next(iter(emit(on_cpu, name).values())))


@pytest.mark.parametrize(
    ("device", "sky", "of_dstack"),
    [
        ("A100-SXM4-80GB", "A100-80GB:8", "A100:80GB:8"),
        ("A100-PCIE-40GB", "A100:8", "A100:40GB:8"),
        ("V100-SXM2-32GB", "V100-32GB:8", "V100:32GB:8"),
        ("RTX-4090", "RTX4090:8", "RTX4090:8"),
        ("RTX-6000-Ada", "RTX6000-Ada:8", "RTX6000-Ada:8"),
        ("L40S", "L40S:8", "L40S:8"),
        ("H200-SXM5-141GB", "H200:8", "H200:141GB:8"),
    ],
)
def test_clouds_call_a_gpu_by_their_own_name(device: str, sky: str, of_dstack: str) -> None:
    plan = make_plan("fsdp", gpus=8)
    plan = replace(plan, cluster={**plan.cluster, "device": device})
    assert f"accelerators: {sky}\n" in emit(plan, "skypilot")["task.yaml"]
    assert f"gpu: {of_dstack}\n" in emit(plan, "dstack")["train.dstack.yml"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ["skypilot", "dstack"])
def test_a_cloud_task_starts_torchrun_on_every_node(name: str, nodes: int, tmp_path: Path) -> None:
    task = yaml.safe_load(next(iter(emit(make_plan("fsdp", gpus=8 * nodes, nodes=nodes), name).values())))
    script = task["run"] if name == "skypilot" else task["commands"][-1]
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SCRIPT": "train.py --lr 1e-4",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9",
        "SKYPILOT_TASK_ID": "sky-1",
        "DSTACK_MASTER_NODE_IP": "10.0.0.7",
        "DSTACK_RUN_NAME": "dsplan",
    }
    started = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, env=given, check=True).stdout
    assert f"--nnodes={nodes} --nproc-per-node=8" in started
    assert started.endswith(" train.py --lr 1e-4\n")
    assert ("--rdzv-endpoint=10.0.0.7:29500" in started) is (nodes > 1)
