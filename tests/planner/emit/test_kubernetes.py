"""Jobs for a Kubernetes cluster, as manifests of three kinds."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import emit
from planner.emit.kubernetes import ClusterJob, manifest, run_command
from planner.vocabulary import JOB_KINDS, JobKind
from tests.planner.emit.plans import make_plan

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "scripts" / "examples" / "kubernetes"
JOB = ClusterJob(
    name="run",
    image="registry.test/train@sha256:" + 64 * "0",
    command=run_command("/runs/run", 2, ("--nproc", "8", "--", "train.py", "--text", "$(HOME) $$x $y")),
    nodes=2,
    processes=8,
    limits={"nvidia.com/gpu": 8, "memory": "64Gi"},
    environment={"DSPLAN_PLAN": "a: $(b)"},
    volume="runs",
    mount="/runs",
    queue="team",
    stop_seconds=45,
)


def _container(kind: JobKind, document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if kind == "TrainJob":
        return dict(spec["trainer"])
    if kind == "JobSet":
        return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0])
    return dict(spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_kubernetes_makes_the_given_words_of_the_commands(kind: JobKind) -> None:
    container = _container(kind, manifest(replace(JOB, kind=kind)))
    assert container["command"][-1] == "$$(HOME) $$$$x $y"
    assert container["env"][0] == {"name": "DSPLAN_PLAN", "value": "a: $$(b)"}
    assert "$(" not in container["command"][2], "the script of the start has no reference"


def test_a_name_for_the_queue_and_no_labels_without() -> None:
    assert manifest(JOB)["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert manifest(replace(JOB, queue=""))["metadata"] == {"name": "run"}


def test_a_runtime_of_the_namespace() -> None:
    assert manifest(replace(JOB, runtime="TrainingRuntime/own"))["spec"]["runtimeRef"] == {
        "name": "own",
        "kind": "TrainingRuntime",
    }


def _start(tmp_path: Path, nodes: int, **variables: str) -> list[str]:
    """The words of the `dsplan` that a container starts."""
    command = tmp_path / "dsplan"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    words = run_command(str(tmp_path / "run"), nodes, ("--nproc", "2", "--", "train.py", "two words"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    finished = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return finished.stdout.splitlines()


def test_a_container_begins_a_run_and_then_resumes_it(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "node0"
    assert _start(tmp_path, 1) == ["run", "--run-dir", str(directory), "--nproc", "2", "--", "train.py", "two words"]
    (directory / "launch.json").touch()
    assert _start(tmp_path, 1) == ["run", "--resume", str(directory)]


def test_nodes_meet_at_the_first_and_save_together(tmp_path: Path) -> None:
    variables = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29500", "RANK": "7"}
    words = _start(tmp_path, 2, **variables, DSPLAN_PLAN="strategy: fsdp")
    meeting = ["--nodes", "2", "--rendezvous", "first:29500", "--checkpoint-dir", str(tmp_path / "run" / "checkpoints")]
    plan = tmp_path / "run" / "node1" / "requested-plan.yaml"
    assert words[:3] == ["run", "--run-dir", str(plan.parent)]
    assert words[3:11] == [*meeting, "--plan", str(plan)]
    assert plan.read_text() == "strategy: fsdp"


SCHEMAS = os.environ.get("DSPLAN_CRDS", "")
"""A directory with trainjobs.yaml, trainingruntimes.yaml, jobsets.yaml and pytorchjobs.yaml: the definitions that their
projects publish, whose rules in CEL are not evaluated. Checked on 2026-11-28 with those of kubeflow/trainer v2.3.0
(SHA-256 a742cafc5b55..., 69b8dbdf60a1...), kubernetes-sigs/jobset 08dfbdfd (029f74bbb91b...) and
kubeflow/training-operator v1.9.0 (eb80e57a984c...)."""


@pytest.mark.slow
@pytest.mark.skipif(not SCHEMAS, reason="needs the published CustomResourceDefinitions, in the directory DSPLAN_CRDS")
@pytest.mark.parametrize("name", [*JOB_KINDS, "one node, no volume", "emitted", "TrainingRuntime"])
def test_manifests_fit_the_published_schemas(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    documents = {
        **{kind: manifest(replace(JOB, kind=kind)) for kind in JOB_KINDS},
        "one node, no volume": manifest(replace(JOB, nodes=1, kind="PyTorchJob", volume="", queue="")),
        "emitted": yaml.safe_load(emit(make_plan("fsdp", gpus=16, nodes=2), "kubernetes")["trainjob.yaml"]),
        "TrainingRuntime": yaml.safe_load((EXAMPLES / "runtime.yaml").read_text()),
    }
    document = documents[name]
    definition = yaml.load((Path(SCHEMAS) / f"{document['kind'].lower()}s.yaml").read_text(), yaml.CSafeLoader)
    group, version = document["apiVersion"].split("/")
    assert definition["spec"]["group"] == group
    (served,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version]
    assert served["served"]
    schema = _strict(served["schema"]["openAPIV3Schema"])
    jsonschema.Draft202012Validator(schema).validate(json.loads(json.dumps(document)))
    with pytest.raises(jsonschema.ValidationError, match="unheard"):
        jsonschema.Draft202012Validator(schema).validate({**document, "spec": {**document["spec"], "unheard": 1}})


def _strict(schema: Any) -> Any:
    """A structural schema as JSON Schema in which fields that the cluster would drop are errors."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    is_closed = "properties" in schema and isinstance(schema.get("type"), str)
    if is_closed and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict
