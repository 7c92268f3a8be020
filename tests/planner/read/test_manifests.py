"""Manifests of clusters: the command that they run is read, with the GPUs that they ask for, and nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.read.recognise import NoTraining
from tests.planner.read.readers import read

TRAINING = "swift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size $BATCH --max_length 2048"
JOB = f"""\
apiVersion: v1
kind: Service
metadata: {{name: head}}
---
apiVersion: batch/v1
kind: Job
spec:
  parallelism: 2
  template:
    spec:
      containers:
        - name: train
          command: [bash, -c]
          args:
            - |
              cd /work
              torchrun --nproc_per_node 8 $(which touch) made || true
              {TRAINING}
          env:
            - {{name: BATCH, value: "4"}}
          resources: {{limits: {{nvidia.com/gpu: 8}}}}
"""
PYTORCH = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      template: &pod
        spec:
          containers:
            - command: [torchrun, --nproc_per_node=4, run_clm.py, --model_name_or_path, gpt2]
              args: [--per_device_train_batch_size, "2", --block_size, "512", --output_dir, "it's here"]
              resources: {limits: {nvidia.com/gpu: "4"}}
    Worker: {replicas: 3, template: *pod}
"""
TRAINER = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
spec:
  trainer:
    numNodes: 2
    command: [axolotl, train, train.yaml]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
"""
SKY = "resources: {accelerators: 'H100:8'}\nnum_nodes: 2\nrun: |\n  " + TRAINING.replace("$BATCH", "4") + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JOB, {"model": "Qwen/Qwen2.5-7B", "micro_batch": 4, "gpus": 16, "nodes": 2}),
        (PYTORCH, {"model": "gpt2", "micro_batch": 2, "seq_len": 512, "gpus": 16, "nodes": 4}),
        (SKY, {"model": "Qwen/Qwen2.5-7B", "micro_batch": 4, "gpus": 16, "nodes": 2}),
    ],
)
def test_commands(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    reading = read(tmp_path, job_yaml=text)
    assert {name: reading.answers.get(name) for name in expected} == expected
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_config_beside_a_manifest(tmp_path: Path) -> None:
    config = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nmicro_batch_size: 2\n"
    reading = read(tmp_path, job_yaml=TRAINER, train_yaml=config)
    assert reading.format == "axolotl"
    assert (reading.answers["gpus"], reading.answers["nodes"]) == (16, 2)


def test_other_manifests_train_nothing(tmp_path: Path) -> None:
    text = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n    - command: [sleep, infinity]\n"
    with pytest.raises(NoTraining, match="starts no training"):
        read(tmp_path, pod_yaml=text)
