"""Rounds of generation in the words of each trainer, and the task that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsplan.checking import Checked, check_files
from planner.read.form import Reading
from tests.planner.read.readers import read, write

TRL = """\
python examples/grpo.py --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name x --num_generations 16 --beta 0.01 \\
    --max_completion_length 1024 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 {more}
"""
VERL = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator={estimator} data.train_batch_size=512 \\
    data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.use_kl_loss={kl} actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8
"""
NEMO = """\
policy: {{model_name: Qwen/Qwen2.5-1.5B, train_global_batch_size: 512, train_micro_batch_size: 4,
  max_total_sequence_length: {total}, dtensor_cfg: {{enabled: true}}, generation: {{max_new_tokens: {total},
  vllm_cfg: {{tensor_parallel_size: 2, gpu_memory_utilization: 0.5}}, colocated: {colocated}}}}}
grpo: {{num_prompts_per_step: 32, num_generations_per_prompt: 16}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""
OPENRLHF = """\
python3 -m openrlhf.cli.train_ppo_ray --model.model_name_or_path meta-llama/Llama-3.1-8B --train.batch_size 128 \\
    --rollout.batch_size 256 --rollout.n_samples_per_prompt 4 --rollout.max_new_tokens 512 --data.prompt_max_len 512 \\
    --actor.num_gpus_per_node 8 {more}
"""
SWIFT = """\
NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --num_generations 4 --max_completion_length 512 \\
    --per_device_train_batch_size 4 --vllm_mode colocate --vllm_gpu_memory_utilization 0.5 --sleep_level 1
"""


def holds(reading: Reading, **expected: Any) -> None:
    assert {name: reading.answers.get(name) for name in expected} == expected


def test_trl(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=TRL.format(more=""))
    holds(reading, task="grpo", generations=16, completion_len="1024", beta=0.01, rollout="hf", seq_len=None)
    assert "max_completion_length" in {item.key for item in reading.read}
    vllm = TRL.format(more="--use_vllm --vllm_mode colocate --vllm_enable_sleep_mode --steps_per_generation 4")
    holds(read(tmp_path, train_sh=vllm), rollout="colocate", rollout_sleep=True, steps_per_generation=4)
    server = f"accelerate launch --num_processes 6 {TRL.format(more='--use_vllm --vllm_mode server')}".replace(
        "python ", "", 1
    )
    holds(read(tmp_path, train_sh=server), rollout="server", rollout_gpus=1, gpus=7)


def test_verl(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=VERL.format(estimator="grpo", kl="True"))
    holds(reading, task="grpo", prompt_len=1024, completion_len="2048", seq_len=3072, generations=8, loss="plain")
    holds(reading, prompts_per_step=512, global_batch=1024, beta=0.002, rollout_tp=2, rollout_memory=0.4)
    holds(read(tmp_path, train_sh=VERL.format(estimator="gae", kl="False")), task="ppo", beta=0.0)


def test_nemo_rl(tmp_path: Path) -> None:
    reading = read(tmp_path, grpo_yaml=NEMO.format(total=4096, colocated="{enabled: true}"))
    holds(reading, task="grpo", seq_len=4096, prompts_per_step=32, generations=16, rollout="colocate", rollout_tp=2)
    apart = "{enabled: false, resources: {gpus_per_node: 4}}"
    reading = read(tmp_path, grpo_yaml=NEMO.format(total=512, colocated=apart))
    holds(reading, rollout="server", rollout_gpus=4, gpus=8, prompt_len=256)


def test_openrlhf(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=OPENRLHF.format(more="--train.colocate_all --vllm.enable_sleep"))
    holds(reading, task="ppo", rollout="colocate", rollout_sleep=True, prompts_per_step=256, beta=0.01)
    apart = "--algo.advantage.estimator group_norm --vllm.num_engines 4 --vllm.tensor_parallel_size 2"
    holds(read(tmp_path, train_sh=OPENRLHF.format(more=apart)), task="grpo", rollout_gpus=8, gpus=16, rollout_tp=2)


def test_ms_swift(tmp_path: Path) -> None:
    holds(read(tmp_path, train_sh=SWIFT), task="grpo", rollout="colocate", rollout_sleep=True, beta=0.04, gpus=4)


@pytest.mark.parametrize(
    "text",
    [
        TRL.format(more=""),
        VERL.format(estimator="grpo", kl="True"),
        OPENRLHF.format(more="--train.colocate_all"),
        SWIFT,
    ],
)
def test_the_verdict_is_by_phases(tmp_path: Path, text: str) -> None:
    checked = check(tmp_path, text)
    plan = checked.audit.plan
    assert plan is not None, checked.audit.why
    assert {"generate", "update"} <= plan.memory.phases.keys()
    assert plan.time.round_seconds is not None
    assert plan.time.round_seconds >= plan.time.step_seconds


def test_of_other_models_the_update_is_left(tmp_path: Path) -> None:
    checked = check(tmp_path, VERL.format(estimator="grpo", kl="True").replace("Qwen2.5-7B", "Qwen2.5-VL-7B-Instruct"))
    assert "update-only" in {finding.id for finding in checked.audit.findings}
    assert checked.audit.plan is not None
    assert checked.audit.plan.configuration.sequence_length == 3072


def check(folder: Path, text: str) -> Checked:
    hardware = {"gpu": "H100-SXM5-80GB", "gpus": 8}
    return check_files(write(folder, train_sh=text), hardware=hardware)
