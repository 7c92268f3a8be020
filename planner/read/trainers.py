"""Trainers whose configs are read: what they can run, the keys that they have, and the words that they share.

Keys and defaults are in `trainers.json`, which `python -m scripts.generate.trainer_keys` reads from the trainers' own
sources; each row names the commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.read.form import Notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer by what it can run of a plan, for the search of a better one."""

    name: str
    """As findings call it."""
    code: str = "transformers"
    """Whose modules it runs (`--code`)."""
    strategies: tuple[words.Strategy, ...] = ("single", "ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
    offloads: tuple[words.Offload, ...] = ("none", "optimizer", "all")
    checkpointings: tuple[words.Checkpointing, ...] = ("none", "full")
    splits: tuple[words.Degree, ...] = ()
    """Degrees that it has beside data parallelism, which a better plan may change."""
    shards_in_bf16: bool = False
    """Whether shards of weights that were loaded in bf16 stay so, states included; else they have fp32 masters."""
    refuses_unknown: bool = False
    """Whether it stops at a key that it does not have."""


PER_NODE = "one a node"
"""The answer `copies` of a trainer that keeps a whole set of shards in each node."""
_HUGGING_FACE: dict[str, Any] = {"refuses_unknown": True}
_MEGATRON_SPLITS: tuple[words.Degree, ...] = ("tp", "pp", "cp", "ep")
TRAINERS: Mapping[str, Trainer] = {
    "deepspeed": Trainer(name="DeepSpeed", strategies=("single", "ddp", "zero1", "zero2", "zero3")),
    "accelerate": Trainer(name="accelerate"),
    "huggingface": Trainer(name="HF Trainer", **_HUGGING_FACE),
    "trl": Trainer(name="TRL", **_HUGGING_FACE),
    "llama-factory": Trainer(name="LLaMA-Factory", **_HUGGING_FACE),
    "axolotl": Trainer(name="axolotl"),
    "ms-swift": Trainer(name="ms-swift", **_HUGGING_FACE),
    "torchtune": Trainer(
        name="torchtune", code="torch", strategies=("single", "fsdp"), offloads=("none", "all"), shards_in_bf16=True
    ),
    "torchtitan": Trainer(
        name="torchtitan",
        code="torchtitan",
        strategies=("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp"),
        offloads=("none", "all"),
        checkpointings=("none", "selective", "full"),
        splits=_MEGATRON_SPLITS,
        refuses_unknown=True,
    ),
    "maxtext": Trainer(
        name="MaxText",
        code="torchtitan",
        strategies=("ddp", "fsdp", "hsdp"),
        offloads=("none",),
        checkpointings=("none", "selective", "full"),
        refuses_unknown=True,
    ),
    "megatron": Trainer(
        name="Megatron-LM",
        code="megatron",
        strategies=("single", "ddp", "zero1"),
        offloads=("none",),
        checkpointings=("none", "selective", "full"),
        splits=_MEGATRON_SPLITS,
        refuses_unknown=True,
    ),
    "megatron-swift": Trainer(
        name="ms-swift's Megatron",
        code="megatron",
        strategies=("single", "ddp", "zero1"),
        offloads=("none",),
        checkpointings=("none", "selective", "full"),
        splits=_MEGATRON_SPLITS,
        refuses_unknown=True,
    ),
    "automodel": Trainer(
        name="NeMo Automodel",
        code="automodel",
        strategies=("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp"),
        offloads=("none", "all"),
        splits=("tp", "cp", "pp", "ep"),
    ),
    "nemo-rl": Trainer(name="NeMo-RL", strategies=("single", "fsdp"), offloads=("none", "all"), splits=("tp", "cp")),
    "verl": Trainer(name="verl", strategies=("single", "fsdp"), offloads=("none", "all")),
    "openrlhf": Trainer(name="OpenRLHF", strategies=("single", "zero1", "zero2", "zero3"), refuses_unknown=True),
    "nanotron": Trainer(
        name="nanotron",
        code="nanotron",
        strategies=("single", "ddp", "zero1"),
        offloads=("none",),
        splits=("tp", "pp", "cp"),
        refuses_unknown=True,
    ),
    "llm-foundry": Trainer(
        name="llm-foundry",
        code="llm-foundry",
        strategies=("single", "fsdp", "fsdp-grad-op", "hsdp"),
        offloads=("none",),
    ),
}


@lru_cache(maxsize=1)
def _rows() -> Mapping[str, Any]:
    rows: Mapping[str, Any] = json.loads(Path(__file__).with_name("trainers.json").read_text(encoding="utf-8"))
    return rows


def keys_of(*trainers: str) -> frozenset[str]:
    """Return the keys of trainers' configs."""
    return frozenset(key for trainer in trainers for key in _rows()[trainer]["keys"])


def default_of(trainer: str, key: str) -> Any:
    """Return the default of a key as the trainer's own source has it; None where it is no literal there."""
    return _rows()[trainer]["defaults"].get(key)


def sources() -> Mapping[str, str]:
    """Return where each trainer's keys were read: a repository at a commit, or a version."""
    return {trainer: row["source"] for trainer, row in _rows().items()}


# Keys that change neither memory nor time of a step, whoever's they are.

_WITHOUT_EFFECT = re.compile(
    r"""(
    .*(wandb|mlflow|comet|swanlab|trackio|tensorboard|clearml|neptune|dvclive|aim_|otel).*
    | (env|secrets|name|volumes|workdir|description|notes|tags)(\..*)? | .*(seed|deterministic)$ | .*logging.*
    | log_.* | .*_log(s|_.*)?$ | .*log_(interval|level|freq|every).* | logger.*
    | .*(run|project|exp|experiment|entity|group|job|user|work)_?(name|id|entity|group|suffix)$ | entity | project
    | group | report_to.* | push_to_hub.* | push_.* | hub_.* | .*hf_(token|hub).* | token | .*_token$
    | .*trust_remote.* | revision.* | output_dir.* | .*output_(path|folder|directory).* | overwrite_.* | resume.*
    | auto_resume.* | checkpoint_dir | load | .*checkpoint_(path|files|folder|dir|keep.*|save.*|format).* | save
    | save_(steps|strategy|total_limit|safetensors|on_each.*|interval|freq|only_model|first_step|every.*|retain.*
      |last|folder|overwrite|num.*|dir) | saves_per_epoch | .*resume_from.* | .*save_interval$ | lr | lr_.* | .*_lr$
    | .*learning_rate.* | min_lr.* | .*warmup.* | .*weight_decay.*
    | .*decay_(style|iters|steps|ratio|epochs|samples) | cosine.* | .*scheduler.* | .*momentum | adam_.*(beta|eps).*
    | .*(beta1|beta2|betas|epsilon|eps)$ | .*clip_?(grad|ratio).* | max_grad_norm | .*grad(ient)?_clip(ping)?.*
    | optim_args | jagged.* | alpha | .*(lora_alpha|lora_dropout|lora_bias|lora_fan.*|init_weights|rslora).*
    | use_bnb_nested_quant | bnb_4bit_(quant_type|quant_storage|compute_dtype)
    | peft_use_rslora | (num_|num_train_)?epochs? | .*num_train_epochs | max_epochs | total_epochs
    | max_steps_per_epoch | .*max_train_steps
    | .*(dataset|datasets|corpus|data_path|data_files|data_dir|datafiles|dataprovider)(\..*)?(_.*)?$ | train_data.*
    | valid_data.* | test_(data|file|size).* | eval_(data|file).* | val_(set_size|size|split|data|file).*
    | .*split(_dataset_ratio)?$ | data_cache.* | shuffle.* | .*template.* | .*tokenizer.*
    | .*prompt(_key|_style|_column|_template|_field)?$ | .*system(_prompt)?$ | roles.* | special_tokens.* | tokens
    | eot_tokens.*
    | .*(input|output|label|chosen|rejected|query|response|messages|image|text)_(key|column|field|keys).*
    | .*preprocess.* | .*num_proc$ | .*(dataloader|data_loader|loader)_?.*(worker|prefetch|persistent|pin).*
    | .*num_workers$ | .*max_samples | streaming.* | interleave.* | mix_strategy | train_on_.* | mask_.*
    | .*cache_dir.* | .*load_from_cache.* | load_args
    | eval(uation)?_(strategy|steps|on_start|interval|iters|delay|every.*) | evals_per_epoch
    | do_(train|eval|predict|test) | early_stopping.* | load_best.* | metric.* | greater_is.*
    | eval_(causal|table|max|sample_packing|num|first|freq) .* | test_freq | val_(before|period|check).*
    | .*ddp_timeout | ddp_(broadcast|find).* | .*(distributed_)?timeout.* | .*backend_timeout | local_rank | rdzv_.*
    | master_.* | .*main_process_(ip|port).* | .*(machine|node)_rank | same_network | tpu_.* | debug | .*verbose.*
    | disable_tqdm | plot_loss | include_.* | ignore_.* | skip_.* | torchdistx_path | strict | version | .*tf32$
    | .*profil.* | .*heartbeat.* | callbacks?(\..*)? | loss_watchdog.* | .*print.* | .*progress_bar
    | .*remove_unused_columns | label_(names|smoothing.*) | group_by_length | length_column.* | dataset_.*
    | .*packing_(strategy|eff).* | neftune.* | temperature | top_[kp]
    | .*(infer_backend|max_new_tokens|merge_lora|stop_words|num_beams|do_sample|repetition_penalty)
    | model_(author|name) | compute_environment | main_training_function | downcast_bf16 | use_cpu
    | enable_cpu_affinity | gpu_ids | steps_per_print | wall_clock.*
    | .*fsdp_(version|use_orig_params|sync_module_states|state_dict_type|cpu_ram_efficient_loading
      |limit_all_gathers|auto_wrap_policy|transformer_layer_cls_to_wrap|backward_prefetch.*|forward_prefetch
      |min_num_params|final_state_dict_type|cpu_offload_pin_memory)
    | fsdp_config\.(version|use_orig_params|sync_module_states|state_dict_type|cpu_ram_efficient_loading
      |limit_all_gathers|auto_wrap_policy|transformer_layer_cls_to_wrap|backward_prefetch.*|forward_prefetch
      |min_num_params|final_state_dict_type|cpu_offload_pin_memory|xla.*) | gradient_checkpointing_kwargs(\..*)?
    | .*use_reentrant.* | .*init_method_std | .*(mock|fake|dummy)_data.* | .*job_name | .*distributed_backend
    | .*exit_.* | .*override_opt.* | use_checkpoint_.* | no_(save|load)_(optim|rng) | finetune
    | .*ckpt_(format|step|path|dir|folder).* | .*(vocab_file|merge_file|merges_file|tokenizer_.*|tiktoken.*)
    | (model|base_model)_(revision|path_.*|ignore.*|config_type) | ports? | .*_port | .*dir$ | .*_path$ | .*_file$
    | .*(timing|timers?)_.* | .*num_dataset_builder_threads | attention_softmax_in_fp32 | .*accuracy.*
    | .*nan.*check.*
    )$""",
    re.VERBOSE,
)


def without_effect(key: str) -> bool:
    """Return whether a key changes neither the memory nor the time of a step; numbers of list items do not count."""
    plain = re.sub(r"\.\d+", "", key).replace("-", "_").lower()
    return _WITHOUT_EFFECT.match(plain) is not None


# Words that trainers share.

OPTIMIZERS: Mapping[str, words.Optimizer] = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw_hf": "adamw-forloop",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_apex_fused": "adamw-fused",
    "fused_adam": "adamw-fused",
    "fusedadam": "adamw-fused",
    "cpuadam": "adamw",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "ao_adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit-paged",
    "pagedadamw8bit": "adamw-8bit-paged",
    "paged_adamw": "adamw",
    "pagedadamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw8bit": "adamw-8bit",
    "adamw_torch_4bit": "adamw-4bit",
    "adamw_torch_8bit": "adamw-8bit",
    "ao_adamw_4bit": "adamw-4bit",
    "ao_adamw_fp8": "adamw-fp8",
    "adamw4bit": "adamw-4bit",
    "decoupled_adamw": "adamw",
    "decoupledadamw": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion",
    "decoupled_lionw": "lion",
    "lion_32bit": "lion",
    "muon": "muon",
    "distributed_muon": "muon",
}


def read_optimizer(book: Notebook, key: str, default: words.Optimizer) -> None:
    """Fill in the optimizer that a key names; of one that is not counted, say so."""
    if key not in book:
        book.answer("optimizer", default)
        return
    word = re.sub(r"\W+", "_", book.word(key).rpartition(".")[2])
    optimizer = OPTIMIZERS.get(word)
    if optimizer is None:
        book.answer("optimizer", default)
        book.leave(key, f"optimizer {word} is not counted; {default} is, in its place", matters=True)
        return
    book.answer("optimizer", optimizer, key)
    if word.startswith("paged") and optimizer == "adamw":
        book.leave(key, "pages of its states may leave the GPU, which is not counted", matters=True)


def read_attention(book: Notebook, key: str, default: words.Attention = "sdpa") -> words.Attention:
    """Fill in the attention that a key names."""
    word = book.word(key)
    attention: words.Attention = default
    if word.startswith(("flash", "fa2", "fa3", "fa4", "kernels-community", "auto_flash")) or "flash" in word:
        attention = "flash"
    elif word in ("eager", "disabled", "unfused", "local", "vanilla"):
        attention = "eager"
    elif word in ("sdpa", "sdp"):
        attention = "sdpa"
    book.answer("attention", attention, key)
    return attention


def read_recomputed_modules(book: Notebook, key: str) -> None:
    """Fill in the modules that Megatron's selective recomputation drops; of those that are not counted, say so."""
    given = (book.text(key) or "").replace(",", " ").split()
    counted = [name for name in given if name in words.RECOMPUTED_MODULES]
    if not counted:
        return
    book.answer("recompute_modules", ",".join(counted), key)
    if len(counted) < len(given):
        others = ", ".join(name for name in given if name not in counted)
        book.leave(key, f"recomputation of {others} is not counted", matters=True)


def lora_targets(value: Any) -> str:
    """Return the targets of adapters as `--lora-targets` takes them."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = str(value).strip()
    return "all-linear" if text in ("all", "all-linear", "all_linear", "all-modules") else text


def set_task(book: Notebook, key: str, word: str) -> None:
    """Fill in the task of a training method's word; of one that is not planned, count its update as supervised.

    CPO and SimPO are pairs without a reference model, as ORPO: modelscope/ms-swift@3602360a refuses one
    (`swift/arguments/rlhf_args.py`), and axolotl@067b021c makes TRL's CPO of SimPO (`src/axolotl/core/builders/rl.py`).
    """
    tasks: Mapping[str, str] = {
        **dict.fromkeys(("sft", "pt", "pretrain", "pretraining", "cpt", "causal_lm", "full"), "causal-lm"),
        "rm": "reward",
        "reward": "reward",
        "dpo": "dpo",
        "ipo": "dpo",
        **dict.fromkeys(("simpo", "cpo"), "orpo"),
        "seq_cls": "seq-cls",
        "reranker": "seq-cls",
        "kto": "kto",
        "orpo": "orpo",
        "grpo": "grpo",
        "ppo": "ppo",
        **dict.fromkeys(("rloo", "gspo", "reinforce", "dapo"), "grpo"),
    }
    task = tasks.get(word, word)
    if task in words.TASKS and task not in words.GENERATING:
        book.answer("task", task, key)
    else:
        book.answer("task", "causal-lm")
        reason = f"{word}: its update is counted as supervised training; further models and generation are not"
        book.leave(key, reason, matters=True)
