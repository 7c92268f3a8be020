"""Configs of axolotl, LLaMA-Factory, ms-swift, TRL, HF Trainer, accelerate and DeepSpeed become flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from planner.read.form import Reading
from planner.read.recognise import NoTraining, read_files
from tests.planner.read.readers import became, read, write

AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
datasets:
  - path: tatsu-lab/alpaca
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
attn_implementation: flash_attention_2
"""
FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
output_dir: out
"""
SWIFT = """\
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type full \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 16 \\
    --max_length 2048 \\
    --deepspeed zero3 \\
    --dataset 'one' 'two'
"""
DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_activation_checkpointing: false
"""


def holds(reading: Reading, **expected: Any) -> None:
    assert {name: reading.answers.get(name) for name in expected} == expected


def ids(reading: Reading) -> list[str]:
    return [finding.id for finding in reading.findings]


def test_axolotl(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=AXOLOTL)
    assert reading.format == "axolotl"
    # axolotl loads weights in bf16 and trains them so, where neither DeepSpeed nor FSDP keep masters
    holds(reading, model="meta-llama/Llama-3.1-8B", seq_len=4096, micro_batch=2, grad_accum=4, precision="bf16-pure")
    holds(reading, optimizer="adamw-fused", attention="flash", checkpointing="full")
    assert became(reading)["micro_batch_size"] == ("micro_batch", 2)
    assert not reading.gaps
    assert next(item for item in reading.read if item.key == "bf16").line == 9


def test_axolotl_adapters_and_sharding(tmp_path: Path) -> None:
    text = f"""{AXOLOTL}adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
fsdp_version: 2
fsdp_config:
  offload_params: true
  reshard_after_forward: false
liger_fused_linear_cross_entropy: true
relora: true
"""
    reading = read(tmp_path, train_yaml=text)
    holds(reading, method="qlora", load_dtype="nf4", lora_rank=32, lora_targets="q_proj,v_proj", precision="bf16")
    holds(reading, strategy="fsdp-grad-op", offload="all", loss="fused")
    assert [item.key for item in reading.gaps] == ["relora"]


def test_axolotl_findings(tmp_path: Path) -> None:
    text = f"{AXOLOTL}adapter: qlora\nfsdp: [full_shard]\ndeepspeed: deepspeed_configs/zero2.json\nlearning_rat: 1\n"
    reading = read(tmp_path, train_yaml=text)
    contradictions = [item.message for item in reading.findings if item.id == "contradiction"]
    assert len(contradictions) == 2
    (unknown,) = [item for item in reading.findings if item.id == "unknown-key"]
    assert "did you mean learning_rate" in unknown.message
    assert unknown.line == 15
    assert reading.findings[0].severity == "error"


def test_llama_factory(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=FACTORY)
    assert reading.format == "llama-factory"
    holds(reading, model="Qwen/Qwen2.5-7B", method="lora", lora_rank=16, lora_targets="all-linear", seq_len=2048)
    holds(reading, precision="bf16", checkpointing="full", optimizer="adamw-fused")  # recomputes unless told otherwise
    whole = FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    full = read(tmp_path, train_yaml=f"{whole}pure_bf16: true\n")
    holds(full, method="full", precision="bf16-pure")


def test_deepspeed_beside_a_config(tmp_path: Path) -> None:
    train, _ = write(tmp_path, train_yaml=f"{FACTORY}deepspeed: ds.json\n", ds_json=DEEPSPEED)
    reading = read_files([train])
    holds(reading, strategy="zero3", backend="deepspeed", offload="all", micro_batch=1, precision="bf16")
    assert {Path(path).name for path in reading.files} == {"train.yaml", "ds.json"}
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace('"auto"', "4", 1))
    assert "contradiction" in ids(read_files([train]))


def test_a_deepspeed_config_that_is_not_there(tmp_path: Path) -> None:
    reading = read(tmp_path, train_yaml=f"{FACTORY}deepspeed: configs/ds_z2_offload_config.json\n")
    holds(reading, strategy="zero2", offload="optimizer")
    assert "is not there" in next(item.message for item in reading.findings if item.id == "assumed")


def test_ms_swift(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=SWIFT)
    assert reading.format == "ms-swift"
    holds(reading, model="Qwen/Qwen2.5-7B-Instruct", method="full", strategy="zero3", gpus=2, precision="bf16")
    holds(reading, seq_len=2048, micro_batch=1, grad_accum=16, checkpointing="full")
    replicas = read(tmp_path, train_sh=SWIFT.replace("    --deepspeed zero3 \\\n", ""))
    holds(replicas, precision="bf16-pure")


def test_trl_and_accelerate(tmp_path: Path) -> None:
    trl = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\nmax_length: 512\nuse_peft: true\n"
    train, accelerate = write(tmp_path, train_yaml=trl, accelerate_yaml=ACCELERATE)
    for reading in (
        read_files([train, accelerate]),
        read_files([], ["accelerate", "launch", "--config_file", str(accelerate), "sft.py", "--config", str(train)]),
    ):
        assert reading.format == "trl"
        holds(reading, gpus=8, strategy="fsdp", precision="bf16", method="lora", lora_rank=16, seq_len=512)


@pytest.mark.parametrize(
    ("more", "precision", "load_dtype"),
    [
        ("", "bf16", None),
        ("dtype: auto\n", "bf16-pure", None),
        ("dtype: bfloat16\n", "bf16-pure", None),
        ("use_peft: true\n", "bf16", "fp32"),
        ("use_peft: true\ndtype: bfloat16\n", "bf16", None),
        ("use_peft: true\nload_in_4bit: true\n", "bf16", "nf4"),
        ('use_peft: true\ndeepspeed: \'{"zero_optimization": {"stage": 3}}\'\n', "bf16", None),
    ],
)
def test_trl_loads_weights_in_fp32_unless_it_is_told(
    tmp_path: Path, more: str, precision: str, load_dtype: str | None
) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\n"
    holds(read(tmp_path, train_yaml=text + more), precision=precision, load_dtype=load_dtype)


def test_no_file_and_no_command_is_one_line() -> None:
    with pytest.raises(DsplanError, match="nothing to read: name a config"):
        read_files([])


def test_huggingface_flags() -> None:
    command = (
        "torchrun --nproc_per_node=4 run_clm.py --model_name_or_path gpt2 --block_size 256 --bf16 True --max_steps 100"
    )
    more = ["--per_device_train_batch_size", "3", "--gradient_checkpointing", "--fsdp", "full_shard offload"]
    reading = read_files([], [*command.split(), *more])
    assert reading.format == "huggingface"
    holds(reading, model="gpt2", gpus=4, micro_batch=3, seq_len=256, precision="bf16", checkpointing="full")
    holds(reading, strategy="fsdp", offload="all")
    assert reading.steps == 100


def test_deepspeed_chats_flags(tmp_path: Path) -> None:
    script = "deepspeed --num_gpus 8 main.py --model_name_or_path facebook/opt-6.7b --max_seq_len 512 %s --deepspeed\n"
    reading = read(tmp_path, train_sh=script % "--zero_stage 2 --lora_dim 128 --only_optimize_lora")
    assert reading.answers.items() >= {"strategy": "zero2", "method": "lora", "lora_rank": 128}.items()
    assert became(reading)["deepspeed"] == ("backend", "deepspeed")
    assert not reading.gaps
    beside = read(tmp_path, train_sh=script % "--zero_stage 2 --lora_dim 128")
    assert {item.key for item in beside.gaps} == {"lora_dim"}
    without = read(tmp_path, train_sh=script % "--task_name mnli")
    assert [(item.key, item.reason.partition(",")[0]) for item in without.gaps] == [
        ("deepspeed", "the script writes its DeepSpeed config itself")
    ]


def test_deepspeed_alone(tmp_path: Path) -> None:
    zero = '"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}'
    text = f'{{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "fp16": {{"enabled": true}}, {zero}}}'
    reading = read(tmp_path, ds_json=text)
    assert reading.format == "deepspeed"
    holds(reading, strategy="zero2", offload="none", global_batch=64, micro_batch=2, precision="fp16")
    assert ids(reading) == ["ignored-key"]


def test_accelerate_beside_deepspeed(tmp_path: Path) -> None:
    train, accelerate, _ = write(
        tmp_path, train_yaml=f"{FACTORY}deepspeed: ds.json\n", accelerate_yaml=ACCELERATE, ds_json=DEEPSPEED
    )
    assert "contradiction" in ids(read_files([train, accelerate]))


def test_accelerates_replicas_beside_cp_need_shards(tmp_path: Path) -> None:
    sizes = "".join(
        f"  parallelism_config_{name}_size: {size}\n"
        for name, size in {"dp_replicate": 2, "cp": 2, "dp_shard": 4}.items()
    )
    text = f"distributed_type: FSDP\nnum_processes: 16\nfsdp_config: {{fsdp_version: 2}}\nparallelism_config:\n{sizes}"
    refused = read(tmp_path, accelerate_yaml=text.replace("dp_shard_size: 4", "dp_shard_size: 1"))
    assert [item.id for item in refused.findings if item.severity == "error"] == ["replicas-without-shards"]
    taken = read(tmp_path, accelerate_yaml=text)
    assert taken.answers.items() >= {"strategy": "hsdp", "shard": 8, "cp": 2}.items()
    assert not [item for item in taken.findings if item.severity == "error"]


def test_recomputed_twice(tmp_path: Path) -> None:
    train, accelerate = write(
        tmp_path,
        train_yaml=FACTORY,
        accelerate_yaml=ACCELERATE.replace(
            "fsdp_activation_checkpointing: false", "fsdp_activation_checkpointing: true"
        ),
    )
    assert "recomputed-twice" in ids(read_files([train, accelerate]))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train_yaml", FACTORY.replace("do_train: true", "do_train: false"), "trains nothing"),
        ("train_yaml", "model_name_or_path: a/b\ntemplate: x\n", "no do_train"),
        ("train_sh", "swift export --model x\n", "`swift export`"),
        ("train_sh", "ls\n", "starts no training"),
        ("train_yaml", "basemodel: x\nsequence_len: 3\n", "did you mean base_model"),
        ("train_yaml", AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: two"), "line 6"),
        ("train_yaml", AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 0"), "at least 1"),
        (
            "train_yaml",
            AXOLOTL.replace("gradient_checkpointing: true", "gradient_checkpointing: maybe"),
            "true or false",
        ),
        ("train_json", '{"hello": 1}', "no config that is read"),
    ],
)
def test_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(DsplanError) as refusal:
        read(tmp_path, **{name: text})
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_no_training_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NoTraining):
        read(tmp_path, train_sh="swift infer --model x\n")


def test_unresolved_values_are_gaps(tmp_path: Path) -> None:
    reading = read(tmp_path, train_sh=SWIFT.replace("accumulation_steps 16", "accumulation_steps $1"))
    (gap,) = reading.gaps
    assert gap.key == "gradient_accumulation_steps"
    assert "known when it runs" in gap.reason


@pytest.mark.parametrize(
    ("texts", "task"),
    [
        ({"train_sh": "swift rlhf --rlhf_type simpo --model Qwen/Qwen2.5-3B --dataset x"}, "orpo"),
        ({"train_sh": "swift rlhf --rlhf_type cpo --model Qwen/Qwen2.5-3B --dataset x"}, "orpo"),
        ({"train_sh": "swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-3B --dataset x"}, "dpo"),
        ({"train_yaml": f"{AXOLOTL}rl: simpo\n"}, "orpo"),
        ({"train_yaml": f"{AXOLOTL}rl: ipo\n"}, "dpo"),
        *(
            ({"train_yaml": f"model_name_or_path: x\nstage: dpo\ndo_train: true\npref_loss: {loss}\n"}, task)
            for loss, task in (("simpo", "orpo"), ("orpo", "orpo"), ("sigmoid", "dpo"), ("ipo", "dpo"))
        ),
    ],
)  # fmt: skip
def test_pairs_without_a_reference_model(tmp_path: Path, texts: dict[str, str], task: str) -> None:
    reading = read(tmp_path, **texts)
    holds(reading, task=task)
    makes_logits = task == "dpo" and "rl: ipo" not in texts.get("train_yaml", "")  # Axolotl has TRL's tiles
    assert reading.answers.get("loss") == ("plain" if makes_logits else None)
