"""Every row of the collection of published runs as a question to `dsplan estimate`, or the reason why it is none.

    python -m scripts.fit.asked_rows COLLECTION.csv

What `published_memory.csv` and `published_training.csv` read of a row (its plan in our words, and what had to be
assumed) is taken from there; the rest, which they had no words for (cp, ep, interleaved pipelines, fp8, adapters), is
read from the collection's own columns and notes. Values are the row's, never fitted. `published_asked.csv` keeps them.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware_db.files import read_shipped_yaml, replace_text
from hardware_db.units import GIB
from scripts.fit.published_code import BY_SOURCE
from scripts.fit.published_rows import MEASUREMENTS, document_of

PATH = MEASUREMENTS / "published_asked.csv"
COLUMNS = (
    "case",
    "source",
    "publication",
    "reading",
    "code",
    "model",
    "config",
    "cluster",
    "flags",
    "tokens_per_s_per_gpu",
    "memory_gib",
    "memory_kind",
    "ran",
    "assumed",
    "why_not",
    "document",
)
Row = Mapping[str, str]
Flags = dict[str, Any]


class NotAskable(Exception):
    """The reason for which a row is no question."""


DATA: Mapping[str, Any] = read_shipped_yaml(Path(__file__).with_suffix(".yaml"))
"""Of sources, GPUs and models, each with where it is from."""
CODES: Mapping[str, str] = {**DATA["codes"], **BY_SOURCE}
AUTOMODEL: Mapping[str, Flags] = DATA["automodel"]


def notes_of(row: Row) -> dict[str, str]:
    """Return the notes of a row by key."""
    return dict(part.split("=", 1) for part in row["notes"].split("; ") if "=" in part)


def code_of(source: str, gpu: str) -> str:
    """Return whose modules a source ran on a GPU; what torchtitan printed of H100s is of 2024 and early 2025."""
    if source.startswith(("torchtitan", "torchao")) and gpu == "H100":
        return "torchtitan-2024"
    if source.startswith("litgpt_peft"):
        return "litgpt-2024"
    return next((code for name, code in CODES.items() if source.startswith(name)), "transformers")


def gpt2(row: Row, *, dropout: float) -> dict[str, Any]:
    """Return a model with learned positions, LayerNorm, GELU and tied embeddings, as a config of transformers."""
    return {
        "model_type": "gpt2",
        "n_embd": int(row["hidden"]),
        "n_layer": int(row["layers"]),
        "n_head": int(row["heads"]),
        "n_inner": int(row["ffn"] or 4 * int(row["hidden"])),
        "vocab_size": int(row["vocab"]),
        "n_positions": int(row.get("sequence_length") or row.get("seq_len") or 0),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "tie_word_embeddings": row.get("tied", "yes") != "no",
    }


def llama(row: Row) -> dict[str, Any]:
    """Return a model with rotary positions, RMSNorm and a gated MLP, as a config of transformers."""
    return {
        "model_type": "llama",
        "hidden_size": int(row["hidden"]),
        "num_hidden_layers": int(row["layers"]),
        "num_attention_heads": int(row["heads"]),
        "num_key_value_heads": int(row["kv_heads"] or row["heads"]),
        "intermediate_size": int(row["ffn"]),
        "vocab_size": int(row["vocab"]),
        "tie_word_embeddings": False,
    }


def starcoder2(row: Row) -> dict[str, Any]:
    """Return a model with rotary positions, LayerNorm and a plain MLP (Nemotron), as a config of transformers."""
    return llama(row) | {"model_type": "starcoder2", "use_bias": False, "residual_dropout": 0.0}


def dropout_of(source: str) -> float:
    """Megatron-LM trains with 0.1 unless told otherwise."""
    own = ("bigscience", "deepspeed_zero", "bmtrain", "vtrain", "megatron_golden", "nemo_launcher")
    return 0.1 if source.startswith(own) else 0.0


# Rows that an earlier collection read.


def from_memory(row: Row) -> tuple[str, dict[str, Any], dict[str, Any], Flags]:
    """Model or config, cluster and flags of a row of published_memory.csv."""
    name, config = row["like"], {}
    if row["code"] == "litgpt" and not row["hidden"]:
        pass
    elif row["hidden"]:
        name = row["model"]
        plain = "gpt2" in row["like"] or "starcoder2-3b" in row["like"]
        dropout = dropout_of(row["source"])
        config = gpt2(row, dropout=dropout) if plain else starcoder2(row) if "starcoder2" in row["like"] else llama(row)
    return name, config, cluster_of(row), plan_flags(row)


def plan_flags(row: Row) -> Flags:
    """Return the flags of a row in the words of a plan."""
    flags: Flags = {
        "strategy": row["strategy"],
        "backend": row["backend"],
        "tp": int(row["tp"]),
        "pp": int(row["pp"]),
        "micro_batch": int(row["micro_batch"]),
        "grad_accum": int(row["grad_accum"]),
        "seq_len": int(row["sequence_length"]),
        "precision": row["precision"],
        "optimizer": row["optimizer"],
        "attention": row["attention"],
        "checkpointing": row["checkpointing"],
        "offload": row["offload"],
    }
    if row["dp_replicate"] != "1" and row["strategy"] not in ("ddp", "single", "hsdp"):
        flags["shard"] = int(row["dp_shard"])
    if "compiled" in row.get("code", "") or row.get("compiled") == "y":
        flags["compile"] = True
    if row["source"].startswith("fms_fsdp"):  # fms_fsdp/policies/mixed_precision.py, bfSixteen
        flags["gradient_compression"] = "bf16"
    return flags


def cluster_of(row: Row) -> dict[str, Any]:
    """Return the cluster file of a row of either earlier file."""
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    device = row["device"]
    if row.get("capacity_gib") == "95.0" or row.get("power_watts") == "500":
        device = "H100-SXM5-96GB"
    given: dict[str, Any] = {
        "gpu": device,
        "nodes": -(-gpus // per_node),
        "gpus_per_node": min(gpus, per_node),
    }
    if row.get("capacity_gib") and device == row["device"]:
        given["capacity_gb"] = round(float(row["capacity_gib"]) * 1.073741824, 3)
    if row.get("intra_link") and gpus > 1:
        given["intra_link"] = row["intra_link"]
    if row.get("inter_link") and given["nodes"] > 1:
        given |= {"inter_link": row["inter_link"], "nics_per_node": int(row["nics"])}
    return given


def from_training(row: Row) -> tuple[str, dict[str, Any], dict[str, Any], Flags]:
    """Return the same of a row of published_training.csv."""
    if row["position"] == "learned":
        config = gpt2(row, dropout=dropout_of(row["source"]))
    else:
        config = llama(row) if row["gated"] == "yes" else starcoder2(row)
    return row["model"], config, cluster_of(row), plan_flags(row)


# Rows that had no words before.


def beyond(row: Row, why: str) -> tuple[str, dict[str, Any], dict[str, Any], Flags, str]:
    """Model, config, cluster, flags and what was assumed, of a row that the earlier files left out."""
    source, notes = row["source_id"], notes_of(row)
    if "remark" in notes and not notes["remark"].startswith("throughput left out"):
        raise NotAskable("contradicts itself (remark)")
    if source.startswith(("libai", "colossalai_llama2")) or not row["gpu_name"]:
        raise NotAskable("the GPU is not named")
    if not (row["tp"] and row["seq_len"]):
        raise NotAskable("sequence length or parallel plan not stated")
    if not (row["micro_batch_per_gpu"] or notes.get("local_batch_per_dp_rank")):
        raise NotAskable("batch not stated")
    if source.startswith(tuple(DATA["no_plan"])):
        raise NotAskable(why or "the parallel plan is not recorded")
    assumed: list[str] = []
    model, config = model_of(row, notes)
    named = "H100 of torchao" if source.startswith("torchao") and row["gpu_name"] == "H100" else row["gpu_name"]
    device = DATA["devices"].get(named, {}).get(row["gpu_mem_gb"])
    if device is None:
        raise NotAskable(f"{row['gpu_name']} {row['gpu_mem_gb']} GB is in no catalogue")
    if notes.get("config", "").endswith(SINGLE_DEVICE) and source.startswith("litgpt_config"):
        row = {**row, "n_gpus": "1", "strategy": "ddp"}
        assumed.append(ONE_DEVICE)
    if notes.get("config", "").endswith("tiny-llama/full.yaml"):
        row = {**row, "grad_accum": "8"}  # global_batch_size: 32, micro_batch_size: 4
    if (
        notes.get("method") == "full"
        and row["n_gpus"] == "1"
        and _states_alone(row) > float(row["measured_peak_mem_gib"])
    ):
        raise NotAskable("prints less memory than weights, gradients and AdamW's moments in bf16 take on one GPU")
    flags = degrees(row, notes, assumed) | work(row, notes, assumed) | adapters(row, notes)
    return model, config, cluster_of_collection(row, device), flags, "; ".join(assumed)


def _states_alone(row: Row) -> float:
    """GiB of the weights of a gated decoder, their gradients and two moments, all in 16 bits."""
    hidden, heads, groups = (int(row[name]) for name in ("hidden", "heads", "kv_heads"))
    block = 2 * hidden * hidden * (1 + groups / heads) + 3 * hidden * int(row["ffn"])
    return 8 * (int(row["vocab"]) * hidden + int(row["layers"]) * block) / GIB


SINGLE_DEVICE = ("lora.yaml", "tiny-llama/full.yaml")
ONE_DEVICE = "one GPU, as the config beside the table says"
"""`devices: 1` in Lightning-AI/litgpt@26857050fe3f config_hub/finetune, lora.yaml, qlora.yaml, tiny-llama/full.yaml: a
machine's other GPUs were idle, and times and memory of 1xA10G and 4xA10G are the same."""


def model_of(row: Row, notes: Row) -> tuple[str, dict[str, Any]]:
    """Return a catalogue name, or a name and a config."""
    name = row["model_name"]
    stem = name.removesuffix("-lora").removesuffix("-sft").removesuffix("-2-node").removesuffix("-sft")
    if stem in DATA["models"]:
        return DATA["models"][stem], {}
    if notes.get("moe") == "yes" or "chatglm" in name or "T0" in name:
        raise NotAskable(f"the architecture of {name} is not in the catalogue")
    if not (row["hidden"] and row["layers"] and row["heads"]):
        raise NotAskable("architecture not stated")
    vocabulary = row["vocab"] or ("50304" if source_is_tiny(row) else "51200" if "gpt3" in name else "")
    if not vocabulary:
        raise NotAskable("architecture not stated")
    full = {**row, "vocab": vocabulary}
    if "swiglu" in row["notes"] and notes.get("swiglu") == "1":
        return name, llama({**full, "ffn": row["ffn"] or str(4 * int(row["hidden"]))})
    if stem.startswith(tuple(DATA["gated"])):
        if not row["ffn"]:
            raise NotAskable("architecture not stated")
        return name, llama(full)
    if stem.startswith("nemotron"):
        return name, starcoder2(full)
    tied = "no" if notes.get("untied_emb") == "1" else "yes"
    return name, gpt2({**full, "tied": tied}, dropout=dropout_of(row["source_id"]))


def source_is_tiny(row: Row) -> bool:
    """Megatron's CI models, whose vocabulary is GPT-2's, padded."""
    return row["source_id"].startswith("megatron_golden")


def number(text: str | None) -> int:
    """Return a degree in the notes; 1 where none is given."""
    return int(text) if text and text.isdigit() else 1


def degrees(row: Row, notes: Row, assumed: list[str]) -> Flags:
    """Strategy, tp, pp, cp, ep, schedule and batch."""
    gpus, tp, pp = int(row["n_gpus"]), int(row["tp"]), int(row["pp"])
    cp, ep, virtual = number(notes.get("cp")), number(notes.get("ep")), number(notes.get("vp"))
    layers = int(row["layers"]) if row["layers"] else 0
    if row["source_id"] == "dgxc_h100" and row["model_name"] == "nemotron4-340b" and notes.get("vp") == "NA":
        virtual = DATA["stages_of_340b"]
        assumed.append("12 stages per rank, as NeMo's recipe for it says")
    if notes.get("vpp_layers"):  # Megatron's CI says layers per virtual stage
        virtual = layers // pp // int(notes["vpp_layers"])
    if gpus % (tp * pp * cp):
        raise NotAskable("the degrees do not divide the GPUs")
    ranks = gpus // (tp * pp * cp)
    if row["source_id"].startswith("nemo_automodel"):
        # Each round of accumulation is a schedule over the local batch (pp_microbatch_size: 1).
        row = {**row, "grad_accum": ""}
        ep = AUTOMODEL[row["model_name"].replace("-2-node", "")].get("ep", ep)
    micro, steps = row["micro_batch_per_gpu"], row["grad_accum"]
    if not micro:
        # The batch of a data-parallel rank, of which torchtitan makes as many micro-batches as there are ranks in the
        # pipeline (pytorch/torchtitan@9dec370, the tables' version, parallelisms/pipelining_utils.py line 81).
        steps = str(pp)
        micro = str(int(notes["local_batch_per_dp_rank"]) // pp)
        assumed.append("as many micro-batches as ranks in the pipeline, torchtitan's default of the day")
    if not steps and row["global_batch"]:
        steps = str(int(row["global_batch"]) // (ranks * int(micro)))
    flags: Flags = {"tp": tp, "pp": pp, "micro_batch": int(micro), "grad_accum": int(steps or 1)}
    if cp > 1:
        flags["cp"] = cp
    if ep > 1:
        flags["ep"] = ep
        if row["source_id"].startswith(tuple(DATA["balanced"])):
            flags["expert_imbalance"] = 1.0
    if virtual > 1 and pp > 1:
        flags |= {"pp_schedule": "interleaved", "virtual_stages": virtual}
    if "Interleaved" in notes.get("variant", ""):
        flags |= {"pp_schedule": "interleaved", "virtual_stages": 2}
        assumed.append("2 stages per rank")
    flags["strategy"] = strategy_of(row, notes, ranks * cp, assumed)
    if row["source_id"].startswith("easycontext"):
        flags["backend"] = "deepspeed"  # accelerate's, with tokens split in the model's own code
    return flags


def strategy_of(row: Row, notes: Row, ranks: int, assumed: list[str]) -> str:
    """Return how the states are spread."""
    source = row["source_id"]
    if source.startswith(("torchtitan", "torchao", "nemo_automodel")):
        return "fsdp" if int(row["n_gpus"]) > 1 else "single"
    if source.startswith(("megatron_bridge", "nemo", "dgxc")):
        if number(notes.get("fsdp")) > 1 or row["strategy"] == "fsdp":
            raise NotAskable("Megatron-FSDP, which is not counted of --code nemo")
        if notes.get("dist_optimizer", "not stated") == "not stated":
            assumed.append("distributed optimizer")
        return "zero1" if ranks > 1 else "ddp" if int(row["n_gpus"]) > 1 else "single"
    if source.startswith("megatron_golden"):
        return "zero1" if notes.get("dist_optimizer") == "1" and ranks > 1 else "ddp"
    if source.startswith("easycontext"):
        return "zero3"
    named = {"fsdp2": "fsdp", "ddp": "ddp", "fsdp": "fsdp", "zero2": "zero2", "zero3": "zero3"}[row["strategy"]]
    return "single" if row["n_gpus"] == "1" else named


def work(row: Row, notes: Row, assumed: list[str]) -> Flags:
    """Sequence, precision, optimizer, attention, recomputation, offload."""
    source = row["source_id"]
    flags: Flags = {"seq_len": int(row["seq_len"]), "optimizer": "adamw-fused"}
    if source.startswith("llmfoundry"):
        flags["optimizer"] = "adamw-forloop"
    if source.startswith(("qwen", "swift", "litgpt", "fsdp_qlora")):
        flags["optimizer"] = "adamw"
    attention = row["attention"] if row["attention"] in ("flash", "sdpa", "eager") else ""
    fused = "eager" if source.startswith("megatron_golden") else "flash"
    flags["attention"] = attention or (fused if source.startswith(("megatron", "nemo", "dgxc")) else "sdpa")
    checkpointing = row["activation_checkpointing"]
    if source.startswith("litgpt_peft") and row["strategy"] == "fsdp":
        checkpointing = "full"  # FSDPStrategy(activation_checkpointing_policy={Block}): litgpt@8641822 finetune/lora.py
    if checkpointing.startswith("selective:layer"):
        flags |= {"checkpointing": "full", "checkpoint_every": int(checkpointing.removeprefix("selective:layer"))}
    elif checkpointing:
        flags["checkpointing"] = checkpointing.partition(":")[0]
    elif modules := recomputed_modules(row, notes):
        flags |= {"checkpointing": "selective", "recompute_modules": modules}
        assumed.append(f"recomputation of {modules.replace(',', ' and ')}, as its recipe asks for")
    else:
        assumed.append("no recomputation")
        if source.startswith("qwen"):  # finetune_lora_*.sh beside the table: --gradient_checkpointing
            flags["checkpointing"] = "full"
            assumed[-1] = "recomputation, as the script beside the table asks for"
        if source.startswith("torchtune"):
            # enable_activation_checkpointing, enable_activation_offloading of the distributed recipes, and
            # LinearCrossEntropyLoss (pytorch/torchtune@bd2a0fc7c314 recipes/configs/llama3_1).
            flags |= {"checkpointing": "full", "loss": "chunked"}
            if row["n_gpus"] != "1":
                flags["activations_on_host"] = True
            assumed[-1] = "recomputation, activations on the host and the loss in chunks, as its recipes ask for"
    if source.startswith("nemo_automodel"):
        recipe = AUTOMODEL[row["model_name"].replace("-2-node", "")]
        flags |= {name: value for name, value in recipe.items() if name not in ("ep", "lora_rank", "lora_targets")}
        assumed[:] = ["as the config that the table names says"]
    flags |= precision(row, notes, assumed)
    if "param_cpu" in row["offload"]:
        flags["offload"] = "all"
    if "activation_cpu" in row["offload"]:
        flags["activations_on_host"] = True
    if row["torch_compile"] == "y":
        flags["compile"] = True
    return flags


def recomputed_modules(row: Row, notes: Row) -> str:
    """Return the modules that the performance recipe of a Megatron-Bridge row recomputes."""
    release = notes.get("release", "")
    if not row["source_id"].startswith("megatron_bridge") or release in DATA["before_recipes"]:
        return ""
    plan = {
        "model": row["model_name"],
        "gpu": row["gpu_name"],
        "pp": int(row["pp"]),
        "micro_batch": int(row["micro_batch_per_gpu"]),
        "precision": row["precision"],
    }
    for recipe in DATA["recomputed"]:
        if release in recipe.get("releases", [release]) and all(
            plan[key] == recipe[key] for key in plan if key in recipe
        ):
            return str(recipe["modules"])
    return ""


def precision(row: Row, notes: Row, assumed: list[str]) -> Flags:
    """bf16, fp16, or 8 and 4 bit with their recipe."""
    label, text = row["precision"], notes.get("precision_label", "") or notes.get("recipe", "")
    scaling = f"{notes.get('scaling', '')} {notes.get('quant', '')}"
    if label == "nvfp4":
        return {"precision": "fp4", "fp8_recipe": "nvfp4"}
    if label == "fp8":
        recipe = DATA["recipes"].get(text.strip())
        if recipe is None:
            recipe = "rowwise" if "rowwise" in scaling else "mxfp8" if "mxfp8" in (scaling + text).lower() else ""
        if not recipe:
            recipe = "tensorwise"
            assumed.append("tensorwise scaling")
        return {"precision": "fp8", "fp8_recipe": recipe}
    stored = notes.get("params_stored", "")
    if row["source_id"].startswith("litgpt_peft"):  # "--precision bf16-true", above the table
        stored = "bf16"
    # from_config makes bf16 weights unless told otherwise, and torch's Adam moments like them, of the adapters' rows as
    # of the others (NVIDIA-NeMo/Automodel@36044ad3d139 nemo_automodel/_transformers/auto_model.py line 846,
    # examples/llm_benchmark, docs/guides/mixed-precision-training.mdx).
    if row["source_id"].startswith("nemo_automodel"):
        stored = "bf16"
    if row["source_id"].startswith("fsdp_qlora"):  # --precision bf16, its default: both dtypes, no autocast
        stored = "bf16"
    return {"precision": "bf16-pure" if label == "bf16" and stored.startswith("bf16") else label or "bf16"}


def adapters(row: Row, notes: Row) -> Flags:
    """Return what is trained: all, or adapters of some rank over weights of some width."""
    peft, source = notes.get("peft", ""), row["source_id"]
    if not peft:
        if source.startswith("torchtune"):
            raise NotAskable("optimizer not stated")
        return {}
    if peft.startswith("adapter"):
        raise NotAskable("LLaMA-Adapter, which no flag says")
    if peft == "lora_emb":
        raise NotAskable("LoRA whose embedding and head are trained too")
    quant = notes.get("quant", "").lower()
    flags: Flags = {"method": "qlora" if peft == "qlora" or "nf4" in quant or "bnb" in quant else "lora"}
    if "gptq" in quant or (source.startswith("qwen") and peft == "qlora"):
        raise NotAskable("LoRA over GPTQ weights, which no flag says")
    if source.startswith("litgpt"):
        return flags | litgpt_adapters(row)
    if source.startswith("nemo_automodel"):
        return flags | {"lora_rank": 16, "lora_targets": "all-linear"}  # dim: 16, target_modules: '*_proj'
    if source.startswith("fsdp_qlora"):
        # lora_rank, lora_target_modules "all" (AnswerDotAI/fsdp_qlora@1a9fddfb train.py, main).
        return flags | {"lora_rank": 64, "lora_targets": "k_proj,q_proj,v_proj,up_proj,down_proj,gate_proj"}
    if source.startswith("torchtune"):
        # lora_attn_modules, apply_lora_to_mlp, lora_rank (recipes/configs/llama3_1/*lora*.yaml).
        targets = "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
        return flags | {"lora_rank": 8 if row["n_gpus"] == "1" else 16, "lora_targets": targets}
    ranks = {"qwen": 64, "swift": 8}
    flags["lora_rank"] = next((rank for name, rank in ranks.items() if source.startswith(name)), 8)
    # The script beside Qwen's table: c_attn, attn.c_proj, w1, w2.
    wide = source.startswith(("qwen", "swift"))
    flags["lora_targets"] = "all-linear" if wide else "attention"
    return flags


def litgpt_adapters(row: Row) -> Flags:
    """Rank and targets, as litgpt's script of the day (@8641822 finetune/lora.py) and its config_hub have them."""
    name = row["model_name"]
    if row["source_id"].startswith("litgpt_peft"):
        return {"lora_rank": 8, "lora_targets": QUERIES_AND_VALUES}
    method = "qlora" if "qlora" in notes_of(row).get("config", "") else "lora"
    starts = (by_method for start, by_method in DATA["adapter_ranks"].items() if name.startswith(start))
    ranks = (rank for by_method in starts for how, rank in by_method.items() if how in ("", method))
    wide = name.startswith(tuple(DATA["wide_recipes"]))
    return {"lora_rank": next(ranks, 32), "lora_targets": "all-linear" if wide else QUERIES_AND_VALUES}


QUERIES_AND_VALUES = r".*\.(q_proj|v_proj|query_key_value|Wqkv|qkv_proj)"
"""Of a model whose queries, keys and values are one matrix, all three."""


def cluster_of_collection(row: Row, device: str) -> dict[str, Any]:
    """Return a cluster file of a row of the collection."""
    gpus, per_node = int(row["n_gpus"]), int(row["gpus_per_node"] or 0)
    if not per_node:
        per_node = 72 if device.startswith("GB") and gpus % 72 == 0 else 64 if device.startswith("GB") else 8
    per_node = min(per_node, gpus)
    if gpus % per_node:
        raise NotAskable("GPUs do not fill whole nodes")
    if device.startswith("GB") and gpus > 4:  # one NVLink domain of up to 72 GPUs
        per_node = next(size for size in (72, 64, 48, 36, 32, 16, 8, 4) if gpus % size == 0 and size <= gpus)
    given: dict[str, Any] = {"gpu": device, "nodes": gpus // per_node, "gpus_per_node": per_node}
    if given["nodes"] > 1 and device in DATA["links"]:
        given |= DATA["links"][device]
    if row["source_id"].startswith("fsdp_qlora") and device in ("RTX-3090", "RTX-4090"):
        given["host_memory_gb"] = 128  # "128GB CPU RAM" of both machines (benchmarks_03_2024.md)
    return given


# All of them.


def question_rows(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a row of published_asked.csv for each row of the collection."""
    memory, training, reasons = read("published_memory"), _by_place(rows), _reasons()
    memories = {row["case"]: row for row in memory}
    for index, row in enumerate(rows):
        source = row["source_id"]
        case = f"{source}-{index + 2}"
        row = {**row, **DATA["corrected"].get(case, {})}
        stated, timed = memories.get(case), training.get(index)
        out = dict.fromkeys(COLUMNS, "") | {
            "case": case,
            "source": source,
            "publication": document_of(source),
            "reading": (timed or {}).get("reading", "vendor" if "vendor" in reasons.get(source, "") else "stated"),
            "code": code_of(source, row["gpu_name"]),
            "model": row["model_name"],
            "document": f"{row['source_repo_or_doc']} {row['source_path']}",
            "ran": "no" if row["fits"] == "0" else "yes",
        }
        if source.startswith(("megatron_bridge", "nemo", "dgxc")):
            out["reading"] = "vendor"
        try:
            if case in DATA["misprinted"]:
                raise NotAskable(f"contradicts itself: {DATA['misprinted'][case]}")
            cluster: dict[str, Any]
            assumed = ""
            if timed is not None:
                name, config, cluster, flags = from_training(timed)
                if source == "dgxc_h100" and name == "nemotron4-340b":
                    flags |= {"pp_schedule": "interleaved", "virtual_stages": DATA["stages_of_340b"]}
                if stated is not None:
                    flags |= {name: stated[name] for name in ("precision", "optimizer")}
                    cluster |= {key: value for key, value in cluster_of(stated).items() if key == "capacity_gb"}
            elif stated is not None and not source.startswith("megatron_golden"):
                name, config, cluster, flags = from_memory(stated)
                if source.startswith("torchtune"):
                    flags |= {"loss": "chunked", "activations_on_host": True, "compile": True}
            else:
                name, config, cluster, flags, assumed = beyond(row, reasons.get(source, ""))
            if stated is not None:
                assumed = stated["assumed"]
                if source.startswith("fms") and not flags.get("compile"):
                    out["code"] = "torch-2024"
                if source.startswith("big"):
                    out["code"] = DATA["named"].get(stated["code"], out["code"])
        except NotAskable as reason:
            yield out | {"why_not": str(reason)}
            continue
        speed, unfit = row["measured_tokens_per_s_per_gpu"], _no_speed(row, timed=timed is not None)
        if speed and unfit:
            speed, assumed = "", "; ".join(filter(None, (assumed, NO_SPEED + unfit)))
        least = "the least" in assumed
        yield out | {
            "model": name,
            "config": json.dumps(config) if config else "",
            "cluster": json.dumps(cluster),
            "flags": json.dumps({flag: value for flag, value in flags.items() if value not in ("", None)}),
            "tokens_per_s_per_gpu": "" if least or out["ran"] == "no" else speed,
            "memory_gib": stated["memory_gib"] if stated is not None else row["measured_peak_mem_gib"],
            "memory_kind": _kind(row, stated),
            "assumed": assumed,
        }


def _kind(row: Row, stated: Row | None) -> str:
    """Return what a row's memory is.

    torchtune's recipes log the peak of what is allocated (pytorch/torchtune@bd2a0fc7c314 torchtune/training/memory.py,
    peak_memory_active), which its README's second table names.
    """
    if row["source_id"].startswith("torchtune"):
        return "allocated"
    return stated["memory_kind"] if stated is not None else row["mem_kind"]


NO_SPEED = "speed not asked: "
"""What `assumed` begins with where a printed speed is no measure of the plan."""


def _no_speed(row: Row, *, timed: bool) -> str:
    """Return why a row's speed is not asked, if it is not."""
    if "power limited" in row["notes"]:
        return "its GPUs' power is limited, to how much is not said"
    if timed:
        return ""
    return next((why for start, why in DATA["unfit_speeds"].items() if row["source_id"].startswith(start)), "")


def _reasons() -> dict[str, str]:
    """Return why rows of a source were left out of times, the commonest last."""
    return {row["source"]: row["why"] for row in read("published_training_left_out")}


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a measurements file."""
    with (MEASUREMENTS / f"{name}.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _by_place(rows: Sequence[Row]) -> dict[int, dict[str, str]]:
    """Rows of published_training.csv by their place in the collection."""
    runs: dict[int, dict[str, str]] = {}
    for run in read("published_training"):
        speed = float(run["tokens_per_s_per_gpu"])
        index = next(
            index
            for index, row in enumerate(rows)
            if index not in runs
            and (row["source_id"], row["model_name"], row["n_gpus"]) == (run["source"], run["model"], run["gpus"])
            and abs(float(row["measured_tokens_per_s_per_gpu"] or 0) / speed - 1) < 1e-3
        )
        runs[index] = run
    return runs


def main(arguments: Iterable[str]) -> None:
    """Write published_asked.csv for a collection."""
    (collection,) = arguments
    with open(collection, newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(question_rows(rows))
    replace_text(PATH, text.getvalue())


if __name__ == "__main__":
    main(sys.argv[1:])
