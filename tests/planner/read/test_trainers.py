"""Configs of torchtune, torchtitan, Megatron-LM, Automodel, NeMo-RL, verl, OpenRLHF, nanotron and llm-foundry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from planner.errors import ContradictoryRequest
from planner.models.from_hf.config import facts_from_config
from planner.read.form import Reading
from planner.read.recognise import FORMATS, NoTraining, form_of_keys, read_files
from planner.read.trainers import TRAINERS, default_of, keys_of, sources
from planner.search.audit import exact_options
from tests.planner.read.readers import became, read, write

TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 16
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
output_dir: /tmp/x
optimizer: {_component_: torch.optim.AdamW, fused: True}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
batch_size_val: ${batch_size}
gradient_accumulation_steps: 8
dtype: bf16
enable_activation_checkpointing: True
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
MEGATRON = """\
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
MODEL_ARGS="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --swiglu --ffn-hidden-size 5504"
ARGS=(
    --micro-batch-size 2   # samples
    --global-batch-size 64
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 6
    --sequence-parallel
    --use-distributed-optimizer
    --recompute-granularity selective --recompute-modules moe_act layernorm
    --bf16 --train-iters 100
    --tokenizer-type Llama2Tokenizer
    --untie-embeddings-and-output-weights
)
srun torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py $MODEL_ARGS ${ARGS[@]} --lr 1e-4
"""
PRIMUS = """\
exp_name: ${PRIMUS_EXP_NAME:x}
modules:
  pre_trainer:
    framework: megatron
    model: llama3.1_8B.yaml
    overrides:
      train_iters: 50
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: ${PRIMUS_SEQ_LENGTH:8192}
      tensor_model_parallel_size: ${PRIMUS_TP:1}
"""
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, max_steps: 20}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
peft: {_target_: x.PeftConfig, target_modules: '*_proj', dim: 8}
distributed: {strategy: fsdp2, tp_size: 2, cp_size: 1, activation_checkpointing: true}
loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""
NEMO_RL_BASE = """\
grpo: {num_generations_per_prompt: 16, max_num_steps: 5}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 512
  precision: bfloat16
  tokenizer: {name: "${policy.model_name}"}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: true, cpu_offload: false}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
VERL = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 $@
"""
OPENRLHF = """\
read -r -d '' commands <<EOF
openrlhf.cli.train_sft --max_len 2048 --train_batch_size 256 --micro_train_batch_size 2 \\
   --pretrain meta-llama/Meta-Llama-3-8B \\
   --zero_stage 3 --adam_offload --bf16 --flash_attn --gradient_checkpointing --lora_rank 64
EOF
deepspeed --num_gpus 4 --module $commands
"""
NANOTRON = """\
model:
  dtype: bfloat16
  model_config: {hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 16,
    num_key_value_heads: 8, vocab_size: 32000, max_position_embeddings: 4096, tie_word_embeddings: false}
optimizer: {zero_stage: 1, optimizer_factory: {name: adamW, torch_adam_is_fused: true}}
parallelism: {dp: 4, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 4096, train_steps: 10}
"""
FOUNDRY = """\
variables: {max_seq_len: 2048}
max_seq_len: ${variables.max_seq_len}
model: {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 24, expansion_ratio: 4, vocab_size: 50368}
train_loader: {name: text}
optimizer: {name: decoupled_adamw}
max_duration: 4800ba
global_train_batch_size: 256
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}
"""


def holds(reading: Reading, **expected: Any) -> None:
    assert {name: reading.answers.get(name) for name in expected} == expected


def test_torchtune(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=TORCHTUNE)
    assert reading.format == "torchtune"
    holds(reading, model="llama-3.1-8b", method="lora", lora_rank=16, seq_len=4096, micro_batch=2, grad_accum=8)
    holds(reading, lora_targets="q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", loss="chunked", strategy="fsdp")
    holds(reading, precision="bf16-pure", optimizer="adamw-fused", checkpointing="full")
    assert not reading.gaps
    path = tmp_path / "train.yaml"
    command = ["tune", "run", "--nproc_per_node", "2", "lora_finetune_distributed", "--config"]
    holds(read_files([], [*command, str(path), "batch_size=4"]), gpus=2, micro_batch=4, model="llama-3.1-8b")


def test_a_recipe_of_torchtune_for_one_gpu_is_called_so(tmp_path: Path) -> None:
    holds(read(tmp_path, tune_yaml=TORCHTUNE), strategy="fsdp")
    holds(read(tmp_path, tune_single_device_yaml=TORCHTUNE), strategy="single", gpus=1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_torchtitan(tmp_path: Path) -> None:
    reading = read(tmp_path, train_toml=TORCHTITAN)
    assert reading.format == "torchtitan"
    holds(reading, model="llama-3.1-8b", tp=2, pp=4, pp_schedule="interleaved", virtual_stages=2, strategy="fsdp")
    holds(reading, checkpointing="full", checkpoint_every=2, micro_batch=1, seq_len=8192)
    assert reading.steps == 1000


def test_replicas_of_torchtitan_beside_cp_are_hsdp(tmp_path: Path) -> None:
    degrees = "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1\n"
    model = "[model]\nname = 'llama3'\nflavor = '8B'\n"
    text = f"{model}[training]\nlocal_batch_size = 1\n[parallelism]\n{degrees}context_parallel_degree = "
    holds(read(tmp_path, train_toml=text + "2\n"), strategy="hsdp", shard=2, cp=2)
    replicas = read(tmp_path, train_toml=text + "1\n")
    holds(replicas, strategy="ddp")
    assert "shard" not in replicas.answers


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_replicas_of_torchtitan_share_what_ranks_are_left(tmp_path: Path) -> None:
    model = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\n"
    degrees = "[parallelism]\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2\n"
    answers = read(tmp_path, train_toml=f"{model}{degrees}data_parallel_shard_degree = -1\n").answers
    assert [exact_options(answers, gpus).shard for gpus in (8, 32)] == [2, 8]
    assert (exact_options(answers, 4).strategy, exact_options(answers, 4).shard) == ("ddp", None)
    with pytest.raises(
        ContradictoryRequest, match=r"2 copies .* 1 ranks that share one x 2 of tp and pp = 4 ranks, not 6"
    ):
        exact_options(answers, 6)
    with pytest.raises(ContradictoryRequest, match="2 copies of the model need 4 GPUs or more, not 2"):
        exact_options(answers, 2)
    answers = read(tmp_path, train_toml=f"{model}{degrees}data_parallel_shard_degree = 4\n").answers
    assert answers["gpus"] == 16
    with pytest.raises(ContradictoryRequest, match="= 16 ranks, not 8"):
        exact_options(answers, 8)


def test_megatron(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=MEGATRON)
    assert reading.format == "megatron"
    holds(reading, gpus=16, nodes=2, micro_batch=2, global_batch=64, seq_len=4096, tp=2, pp=2, virtual_stages=2)
    holds(reading, strategy="zero1", checkpointing="selective", precision="bf16", sequence_parallel=True)
    holds(reading, recompute_modules="moe_act,layernorm")
    facts = facts_from_config(reading.answers["model_config"], "megatron")
    assert (facts.num_layers, facts.hidden_size, facts.gated_mlp, facts.vocab_size) == (24, 2048, True, 32000)
    assert reading.steps == 100
    setting = reading.settings["micro_batch_size"]
    assert MEGATRON[setting.start : setting.end] == "2"
    assert not reading.gaps
    others = read(tmp_path, train_sh=MEGATRON.replace("moe_act layernorm", "mlp mhc"))
    holds(others, recompute_modules="mlp")
    assert [(gap.key, gap.reason) for gap in others.gaps] == [
        ("recompute_modules", "recomputation of mhc is not counted")
    ]


@pytest.mark.parametrize(("blocks", "every"), [(6, None), (3, 2), (2, 3), (1, 6)])
def test_megatrons_blocks_of_a_chunk_are_every_so_many(tmp_path: Path, blocks: int, every: int | None) -> None:
    """24 layers in two stages of two chunks: six a chunk."""
    full = f"--recompute-granularity full --recompute-method block --recompute-num-layers {blocks}"
    selective = "--recompute-granularity selective --recompute-modules moe_act layernorm"
    script = MEGATRON.replace(selective, full)
    reading = read(tmp_path, train_sh=script)
    assert reading.answers["checkpointing"] == "full"
    assert reading.answers.get("checkpoint_every") == every
    assert "recompute_num_layers" not in [gap.key for gap in reading.gaps]


@pytest.mark.parametrize(
    ("flags", "model_type"),
    [
        ("", "gpt2"),
        ("--position-embedding-type rope", "gpt_neox"),
        ("--position-embedding-type alibi", "bloom"),
        ("--swiglu --num-experts 8 --moe-router-topk 2 --position-embedding-type rope", "mixtral"),
        ("--swiglu --num-experts 8 --moe-shared-expert-intermediate-size 512 --moe-ffn-hidden-size 256", "qwen2_moe"),
        ("--swiglu --multi-latent-attention --num-experts 8 --moe-ffn-hidden-size 256 --q-lora-rank 64", "deepseek_v3"),
    ],
)
def test_shapes_of_megatron(flags: str, model_type: str) -> None:
    shape = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1"
    reading = read_files([], f"torchrun pretrain_gpt.py {shape} {flags} --bf16".split())
    config = reading.answers["model_config"]
    assert config["model_type"] == model_type
    assert facts_from_config(config, "x").parameters > 10**6


def test_megatron_with_its_deepspeed_config(tmp_path: Path) -> None:
    script = """\
CONFIG=./ds.$SLURM_JOBID.json
cat <<EOT > $CONFIG
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}
EOT
deepspeed pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 2 \\
  --seq-length 512 --fp16 --deepspeed --deepspeed_config $CONFIG
"""
    reading = read(tmp_path, train_sh=script)
    holds(reading, code="megatron-deepspeed", strategy="zero1", precision="fp16")


def test_primus_takes_defaults_of_variables(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=PRIMUS)
    assert reading.format == "megatron"
    holds(reading, model="llama3.1_8B", seq_len=8192, tp=1, micro_batch=2, precision="bf16")


def test_megatron_of_ms_swift() -> None:
    command = "megatron sft --model Qwen/Qwen2.5-7B --tuner_type lora --tensor_model_parallel_size 2"
    reading = read_files(
        [],
        f"{command} --micro_batch_size 4 --global_batch_size 16 --max_length 2048 --recompute_granularity full".split(),
    )
    assert reading.format == "megatron-swift"
    holds(reading, model="Qwen/Qwen2.5-7B", method="lora", tp=2, micro_batch=4, global_batch=16, checkpointing="full")


def test_automodel(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=AUTOMODEL)
    assert reading.format == "automodel"
    holds(reading, model="meta-llama/Llama-3.2-1B", micro_batch=8, global_batch=64, method="lora", lora_rank=8, tp=2)
    holds(reading, strategy="fsdp", loss="fused", checkpointing="full", lora_targets="all-linear")
    assert reading.steps == 20


def test_nemo_rl_over_another_config(tmp_path: Path) -> None:
    write(tmp_path, base_yaml=NEMO_RL_BASE)
    text = "defaults: base.yaml\npolicy: {train_micro_batch_size: 4}\ncluster: {num_nodes: 2}\n"
    reading = read(tmp_path, train_yaml=text)
    assert reading.format == "nemo-rl"
    holds(reading, model="Qwen/Qwen2.5-1.5B", micro_batch=4, global_batch=64, gpus=16, nodes=2, checkpointing="full")
    (tmp_path / "base.yaml").unlink()
    assert "defaults" in {item.key for item in read_files([tmp_path / "train.yaml"]).gaps}


def test_what_nemo_rl_recomputes_and_multiplies(tmp_path: Path) -> None:
    text = """\
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 16, max_num_steps: 5}
reward_penalties: {penalize_unwanted_tokens: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: "${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}"
  max_total_sequence_length: 512
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    recompute_granularity: selective
    recompute_modules: [moe_act, layernorm]
    cuda_graph_impl: none
    fine_grained_activation_offloading: true
    mtp_loss_scaling_factor: 0.1
    model_overrides: {}
"""
    reading = read(tmp_path, train_yaml=text)
    holds(reading, global_batch=128, checkpointing="selective", recompute_modules="moe_act,layernorm")
    section = "policy.megatron_cfg."
    gaps = {item.key.removeprefix(section): item.reason for item in reading.gaps if item.key.startswith(section)}
    assert gaps == {"fine_grained_activation_offloading": "activations in host memory are not counted"}
    holds(read(tmp_path, train_yaml=text.replace("selective", "full")), checkpointing="full")
    evaluation = "generation: {backend: vllm}\ndata: {max_input_seq_length: 2048}\nenv: {math: {num_workers: 8}}\n"
    with pytest.raises(NoTraining, match="evaluates a model"):
        read(tmp_path, train_yaml=evaluation)


def test_automodel_recomputes_selectively(tmp_path: Path) -> None:
    def checkpointing(word: str) -> object:
        text = AUTOMODEL.replace("activation_checkpointing: true", f"activation_checkpointing: {word}")
        return read(tmp_path, train_yaml=text).answers["checkpointing"]

    assert {word: checkpointing(word) for word in ("selective", "full", "disabled", "false")} == {
        "selective": "selective", "full": "full", "disabled": "none", "false": "none",
    }  # fmt: skip
    with pytest.raises(DsplanError, match="give true or false"):
        checkpointing("sometimes")


def test_adapters_of_primus(tmp_path: Path) -> None:
    adapters = "      lora: {enabled: true, dim: 16, alpha: 32, target_modules: [linear_qkv, linear_proj%s]}\n"
    whole = read(tmp_path, train_yaml=PRIMUS + adapters % ", linear_fc1, linear_fc2")
    holds(whole, method="lora", lora_rank=16, lora_targets="all-linear")
    some = read(tmp_path, train_yaml=PRIMUS + adapters % "")
    assert {item.key for item in some.gaps} - {item.key for item in whole.gaps} == {"lora.target_modules"}
    without = read(tmp_path, train_yaml=PRIMUS + (adapters % "").replace("enabled: true", "enabled: false"))
    assert "method" not in without.answers
    with pytest.raises(NoTraining, match="diffusion"):
        read(tmp_path, train_yaml=PRIMUS.replace("    model:", "    trainer_class: FluxPretrainTrainer\n    model:"))


def test_the_name_of_verls_config_says_its_engine(tmp_path: Path) -> None:
    named = VERL.replace("main_ppo ", "main_ppo --config-name=%s ")
    megatron = read(tmp_path, train_sh=named % "'ppo_megatron_trainer.yaml'")
    holds(megatron, code="megatron", strategy="zero1")
    assert "config_name" not in {item.key for item in megatron.gaps}
    other = read(tmp_path, train_sh=named % "gsm8k_multiturn_grpo")
    holds(other, strategy="fsdp")
    assert "config_name" in {item.key for item in other.gaps}


def test_verl(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=VERL)
    assert reading.format == "verl"
    holds(reading, model="Qwen/Qwen2-7B-Instruct", seq_len=1536, micro_batch=4, global_batch=1280, gpus=16, nodes=2)
    assert "actor_rollout_ref.rollout.n" in became(reading)


def test_openrlhf(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=OPENRLHF)
    assert reading.format == "openrlhf"
    holds(reading, model="meta-llama/Meta-Llama-3-8B", gpus=4, strategy="zero3", offload="optimizer", lora_rank=64)
    holds(reading, micro_batch=2, global_batch=256, attention="flash", checkpointing="full", precision="bf16")


def test_nanotron_and_llm_foundry(tmp_path: Path) -> None:
    nanotron = read(tmp_path, nanotron_yaml=NANOTRON)
    assert nanotron.format == "nanotron"
    holds(nanotron, gpus=8, tp=2, strategy="zero1", micro_batch=2, grad_accum=8, sequence_parallel=True)
    assert facts_from_config(nanotron.answers["model_config"], "x").num_layers == 16
    foundry = read(tmp_path, foundry_yaml=FOUNDRY)
    assert foundry.format == "llm-foundry"
    holds(foundry, seq_len=2048, global_batch=256, micro_batch=8, strategy="fsdp", checkpointing="full")
    assert foundry.steps == 4800
    assert facts_from_config(foundry.answers["model_config"], "x").hidden_size == 1024


def test_a_task_of_skypilot(tmp_path: Path) -> None:
    text = "resources: {accelerators: 'H100:8'}\nnum_nodes: 2\nrun: |\n  " + VERL.replace("\n", "\n  ").replace(
        " $@", ""
    )
    reading = read(tmp_path, task_yaml=text)
    assert reading.format == "verl"
    holds(reading, gpus=16, nodes=2)


def test_what_trains_nothing(tmp_path: Path) -> None:
    for text in (
        TORCHTUNE.replace("optimizer:", "no_optimizer:"),
        "MODEL_ARGS:\n  --num-layers: 2\n  --prompts: hello\n  --micro-batch-size: 1\n",
        "dist_env: {backend: nccl}\nflow_matching: {a: 1}\nstep_scheduler: {global_batch_size: 1}\n",
    ):
        with pytest.raises(NoTraining):
            read(tmp_path, train_yaml=text)


def test_keys_and_defaults_have_their_source() -> None:
    assert all("@" in source or "transformers" in source for source in sources().values())
    assert default_of("axolotl", "micro_batch_size") == 1
    assert default_of("huggingface", "per_device_train_batch_size") == 8
    assert {"base_model", "sequence_len"} <= keys_of("axolotl")
    assert set(FORMATS) == set(TRAINERS)
    assert form_of_keys(frozenset({"a", "b"})) is None


REGISTRY = """\
from torchtitan.trainer import Trainer
import os
os.system("touch ran")


def _training(samples=2) -> TrainingConfig:
    return TrainingConfig(num_tokens_per_microbatch_per_dp_rank=samples * 8192, max_context_length=8192, steps=1000)


def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=size_of(model_spec))),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=_training(),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b()
    config.training.num_tokens_per_train_step = 64 * 8192
    config.activation_checkpoint = None
    config.compile = CompileConfig(enable=True, components=["model"])
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    return config


def llama3_8b_lora() -> Trainer.Config:
    config = dataclasses.replace(llama3_8b(), training=_training(samples=1))
    config.model_spec = model_registry("8B", converters=[LoRAConverter.Config(rank=4, target_modules=["wq", "wo"])])
    if os.environ["DEEP"]:
        config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.tensor_parallel_degree = int(os.environ["TP"])
    return config


def of_another_file() -> Trainer.Config:
    return wrapped(base())
"""


def registered(folder: Path, name: str = "", text: str = REGISTRY) -> Reading:
    path = folder / "config_registry.py"
    path.write_text(text)
    return read_files([Path(f"{path}:{name}") if name else path])


def test_a_registry_of_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reading = registered(tmp_path, "llama3_8b")
    holds(reading, model="Llama-3.1-8B", micro_batch=2, seq_len=8192, tp=2, checkpointing="full", loss="chunked")
    holds(reading, precision="bf16", optimizer="adamw-fused", strategy="fsdp", global_batch=None)
    assert (reading.steps, reading.gaps) == (1000, ())
    assert became(reading)["hf_assets_path"] == ("model", "Llama-3.1-8B")
    assert next(item.line for item in reading.read if item.key == "hf_assets_path") == 14
    float8 = registered(tmp_path, "llama3_8b_float8")
    holds(float8, precision="fp8", fp8_recipe="rowwise", global_batch=64, checkpointing="none", compile=True)
    lora = registered(tmp_path, "llama3_8b_lora")
    holds(lora, method="lora", lora_rank=4, lora_targets="wq,wo", micro_batch=1, pp=1, tp=1)
    assert {item.key for item in lora.gaps} == {"parallelism.tensor_parallel_degree", "line 35"}
    assert not (tmp_path / "ran").exists()


CHANGED = f"""

def changed() -> Trainer.Config:
    config = llama3_8b()
    config.training.steps = {"9" * 400} / 2
    config.training.update(max_context_length=64)
    config.parallelism.tensor_parallel_degree *= 2
    return config
"""


def test_what_the_text_of_a_registry_does_not_settle_is_named(tmp_path: Path) -> None:
    reading = registered(tmp_path, "changed", REGISTRY + CHANGED)
    holds(reading, model="Llama-3.1-8B", seq_len=8192, tp=2)
    assert reading.steps is None
    assert {"training.steps", "line 48", "line 49"} <= {item.key for item in reading.unread}


def test_a_command_of_torchtitan_names_a_config_of_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    registered(folder, "llama3_8b")
    command = "torchrun --nproc_per_node=4 -m torchtitan.train --module llama3 --config llama3_8b_float8"
    reading = read_files([], [*command.split(), "--training.max_context_length", "4096"])
    holds(reading, gpus=4, model="Llama-3.1-8B", seq_len=4096, micro_batch=4, global_batch=128)
    with pytest.raises(NoTraining, match="the registry of qwen3 is not there"):
        read_files([], command.replace("llama3 ", "qwen3 ").split())


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("", REGISTRY, "holds 4 configs .llama3_8b, .* name one: .*config_registry.py:llama3_8b"),
        ("llama3_9b", REGISTRY, "unknown config 'llama3_9b'; nearest: llama3_8b"),
        ("of_another_file", REGISTRY, "line 41: of_another_file builds on wrapped"),
        ("", "def f(:\n", "line 1: is not Python"),
        ("", "x = 1\n", "no function that returns a Trainer.Config"),
        ("a", "def a() -> Trainer.Config:\n    return a()\n", "a calls itself without end"),
        ("a", "def a() -> Trainer.Config:\n    return 3\n", "returns no config that its text says"),
        ("a", f"def a() -> Trainer.Config:\n    return {'1+' * 900}1\n", "nested too deep"),
        ("", f"x = {'(' * 400}1{')' * 400}\n", "is not Python"),
    ],
)
def test_a_registry_that_says_nothing_is_one_line(tmp_path: Path, name: str, text: str, line: str) -> None:
    with pytest.raises(DsplanError, match=line) as caught:
        registered(tmp_path, name, text)
    assert "\n" not in str(caught.value)


PRIMUS_MAXTEXT = """\
modules:
  pre_trainer:
    framework: maxtext
    model: llama3_8B.yaml
    overrides:
      steps: 50
      dcn_data_parallelism: -1
      ici_fsdp_parallelism: {fsdp}
      ici_tensor_parallelism: {tp}
      remat_policy: {policy}
      max_target_length: 8192
      per_device_batch_size: 4
"""


@pytest.mark.parametrize(
    ("policy", "tp", "counted"), [("full", 1, ("full", 4)), ("none", 2, ("none", 8)), ("minimal", 1, ("selective", 4))]
)
def test_maxtext_of_primus(tmp_path: Path, policy: str, tp: int, counted: tuple[str, int]) -> None:
    reading = read(tmp_path, train_yaml=PRIMUS_MAXTEXT.format(fsdp=8, policy=policy, tp=tp))
    assert (reading.format, reading.steps) == ("maxtext", 50)
    holds(reading, model="llama3_8B", seq_len=8192, precision="bf16-pure", tp=tp)
    holds(reading, checkpointing=counted[0], micro_batch=counted[1])
    assert ("remat_policy" in {gap.key for gap in reading.gaps}) is (policy == "minimal")
    on = [exact_options(reading.answers, 8 * tp * nodes, nodes) for nodes in (1, 2)]
    assert [(options.strategy, options.shard) for options in on] == [("fsdp", None), ("hsdp", 8)]


def test_megatron_bridge_of_primus(tmp_path: Path) -> None:
    overrides = "micro_batch_size: 1\n      global_batch_size: 8\n      seq_length: 2048\n      peft: "
    head = "modules:\n  sft:\n    framework: megatron_bridge\n    model: llama31_70b.yaml\n    overrides:\n      "
    adapters = read(tmp_path, train_yaml=f"{head}{overrides}lora\npeft:\n  dim: 16\n")
    holds(adapters, model="llama-3.1-70b", method="lora", lora_rank=16, strategy="ddp", precision="bf16")
    holds(read(tmp_path, train_yaml=f"{head}{overrides}none\n"), method="full", strategy="zero1")


CHAT = """\
ZERO=$1
if [ "$ZERO" == "" ]; then
    ZERO=3
fi
deepspeed --num_gpus 8 main.py --actor_model_name_or_path facebook/opt-13b \\
   --critic_model_name_or_path facebook/opt-350m \\
   --per_device_training_batch_size 16 --max_answer_seq_len 256 --max_prompt_seq_len 128 --actor_zero_stage $ZERO \\
   --actor_gradient_checkpointing --deepspeed --enable_hybrid_engine
"""


def test_rounds_of_deepspeed_chat(tmp_path: Path) -> None:
    reading = read(tmp_path, run_sh=CHAT)
    holds(reading, model="facebook/opt-13b", task="ppo", prompt_len=128, completion_len="256", rollout="hf", gpus=8)
    holds(reading, micro_batch=16, strategy="zero3", backend="deepspeed", precision="fp16", checkpointing="full")
    assert {gap.key for gap in reading.gaps} == {"critic_model_name_or_path"}


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("mpirun -n 4 --mca btl ^openib -x A=1 python pretrain_gpt.py {flags}\n", 4),
        ("apptainer run --nv --bind /a image.sif torchrun --nproc_per_node 4 pretrain_gpt.py {flags}\n", 4),
        ('cmd="deepspeed --num_gpus 4 pretrain_gpt.py\n {flags}\n"\neval $cmd\n', 4),
    ],
)
def test_launchers_of_launchers(tmp_path: Path, text: str, gpus: int) -> None:
    flags = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --micro-batch-size 2 --seq-length 1024"
    holds(read(tmp_path, run_sh=text.format(flags=flags)), micro_batch=2, seq_len=1024, gpus=gpus)


@pytest.mark.parametrize("text", ["tools: [search]\n", "inference:\n  num_inference_steps: 28\n  prompts: [a]\n"])
def test_a_config_without_a_word_of_training(tmp_path: Path, text: str) -> None:
    with pytest.raises(NoTraining, match="trains nothing"):
        read(tmp_path, some_yaml=text)
