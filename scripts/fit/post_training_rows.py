"""Published runs of post-training as questions to `dsplan estimate`, or the reason why a row is none.

    python -m scripts.fit.post_training_rows COLLECTION.csv MS-SWIFT

reads the collection of published rows and a checkout of ms-swift, whose scripts state memory in their comments, and
writes `post_training_asked.csv`. A script's question is what `dsplan check` reads of it, its samples as long as
ms-swift's own list of data sets says. Values are the row's and its recipe's, never fitted.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dsplan.checking import check_files
from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from scripts.fit.published_rows import MEASUREMENTS

PATH = MEASUREMENTS / "post_training_asked.csv"
COLUMNS = (
    *("case", "split", "framework", "kind", "model", "question", "seconds", "memory_gib", "ran", "assumed", "why_not"),
    "source",
)
Row = Mapping[str, str]
Flags = dict[str, Any]


class NotAskable(Exception):
    """The reason for which a row is no question."""


def numbers(text: str) -> list[int]:
    """Return the whole numbers in a text, thousands marked by commas or not."""
    return [int(part.replace(",", "")) for part in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", text)]


# ms-swift: scripts, with the memory that their comments state.

SWIFT_GPU = "A100-SXM4-80GB"
"""Where a script names none: most state 40 to 80 GiB."""
NOT_COUNTED = {
    "optimizer_cpu_offload true": "Megatron's optimizer on the host, which is not counted of --code megatron",
    "sequence_parallel_size": "ms-swift's sequence parallelism",
    "--rlhf_type ppo": "PPO with four models, which is not read of a script",
    "--rlhf_type gkd": "distillation, which is not read of a script",
    "device_map": "a model spread over cards by layers",
    "-AWQ": "weights in AWQ",
    "GPTQ": "weights in GPTQ",
    "adalora": "AdaLoRA",
    "--train_type bone": "Bone adapters",
    "--tuner_type bone": "Bone adapters",
    "--tuner_type adalora": "AdaLoRA",
    "embedding": "an embedding's loss",
    "reranker": "a reranker's loss",
}
"""Words of a script, and what they mean that no flag says."""


DATASETS = "docs/source_en/Instruction/Supported-models-and-datasets.md"
"""ms-swift's list of data sets, with the tokens of their samples: mean, deviation, least and most."""


@cache
def dataset_lengths(checkout: Path) -> Mapping[str, tuple[float, int]]:
    """Return tokens of a sample on average and at most, by the name of a data set."""
    text = (checkout / DATASETS).read_text(encoding="utf-8")
    rows = re.findall(r"^\|\[([^]]+)\].*?\|([\d.]+)±[\d.]+, min=\d+, max=(\d+)\|", text, re.MULTILINE)
    return {name: (float(mean), int(most)) for name, mean, most in rows}


def sample_length(text: str, flags: Mapping[str, Any], checkout: Path, *, is_padded: bool) -> int | None:
    """Return tokens of a sample of the largest micro-batch of a script's data; None where no list knows the data.

    The longest sample is in it. Collators pad the others to that, or put them behind each other as they are.
    """
    named = re.search(r"--dataset((?:\s|\\|'[^']*'|[\w.:#-]+/[\w.:#/-]+)+)", text)
    parts = re.findall(r"([\w.-]+/[\w.-]+)(?::\w+)?(?:#(\d+))?", named[1] if named else "")
    lengths = dataset_lengths(checkout)
    if not parts or any(name not in lengths for name, _ in parts):
        return None
    limit, samples = flags["seq_len"], flags["micro_batch"]
    longest = min(max(lengths[name][1] for name, _ in parts), limit)
    counts = [int(count or 1) for _, count in parts]
    mean = sum(lengths[name][0] * count for (name, _), count in zip(parts, counts, strict=True)) / sum(counts)
    tokens = longest if is_padded else (longest + (samples - 1) * min(mean, limit)) / samples
    shared = flags.get("tp", 1) * flags.get("cp", 1)
    return math.ceil(tokens / shared) * shared


def of_swift(row: Row, checkout: Path) -> tuple[Flags, str, str]:
    """Return the flags of a script, the kind of its samples, and what was assumed.

    Raises:
        NotAskable: the script is not there, or says what no flag says.
    """
    path = row["source"].split(" ", 1)[1]
    script = checkout / path
    if not script.is_file():
        raise NotAskable("a table, whose flags are not stated")
    text = script.read_text(encoding="utf-8")
    reason = next((why for words, why in NOT_COUNTED.items() if words in text), "")
    if reason:
        raise NotAskable(reason)
    try:
        checked = check_files([script], hardware={"gpu": SWIFT_GPU, "gpus": int(row["n_gpus"])})
    except DsplanError as error:
        raise NotAskable(str(error).partition("line ")[2] or str(error)) from error
    plan = checked.audit.plan
    if plan is None or any(finding.id == "model-by-size" for finding in checked.audit.findings):
        raise NotAskable("the architecture is not in the catalogue, or has images")
    flags = dict(checked.question) | {"model": plan.model["name"]}
    if "packing true" in text:
        return flags, "packed", f"on {SWIFT_GPU}"
    # padding_free is Megatron's default there (megatron_args.py), and not that of the others (template_args.py).
    is_free = "padding_free true" in text or (flags["code"] == "megatron" and "padding_free false" not in text)
    is_padded = not is_free or "without padding_free" in row["note"]
    tokens = sample_length(text, flags, checkout, is_padded=is_padded)
    how = "padded" if is_padded else "not padded"
    assumed = (
        f"on {SWIFT_GPU}" if tokens is None else f"on {SWIFT_GPU}; samples of {tokens} tokens, as its data has them"
    )
    return flags if tokens is None else flags | {"seq_len": tokens}, how, assumed


A800_TABLE: Mapping[str, Flags] = {
    "Megatron PP2 EP8 full recompute": {"code": "megatron", "strategy": "zero1", "pp": 2, "ep": 8},
    "ZeRO-2": {"code": "transformers", "strategy": "zero2", "backend": "deepspeed"},
    "ZeRO-3": {"code": "transformers", "strategy": "zero3", "backend": "deepspeed"},
}
"""Plans of the table of full training of Qwen3-30B-A3B on 16 A800, by its words."""


def of_table(row: Row) -> tuple[Flags, str, str]:
    """Return the same of that table, whose samples are packed to 8,192 tokens."""
    flags = {"model": "Qwen/Qwen3-30B-A3B", "gpus": 16, "gpu": "A800-SXM4-80GB", "seq_len": 8192, "global_batch": 16}
    work = {"micro_batch": 1, "precision": "bf16", "checkpointing": "full", "attention": "flash"}
    return flags | work | A800_TABLE[row["train_plan"]], "packed", "packed, as the table's script packs"


# NeMo-RL: rounds of GRPO, with the plans of its recipes.

MODELS = {
    "LLAMA3.1_8B": "meta-llama/Llama-3.1-8B",
    "DeepSeek V3": "deepseek-ai/DeepSeek-V3",
    "Qwen3-235B": "Qwen/Qwen3-235B-A22B",
    "Qwen3-30B3A": "Qwen/Qwen3-30B-A3B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
}
PROMPT = 110
"""Tokens of a prompt, as tokens/s and seconds of a step imply beside the mean completion."""


def of_nemo_rl(row: Row) -> tuple[Flags, str, str]:
    """Return the flags of a round of NeMo-RL, and whether its model has experts.

    Raises:
        NotAskable: the model or the algorithm is not one that is counted.
    """
    if row["model"] not in MODELS or "DAPO" in row["algorithm"]:
        raise NotAskable("the model is not in the catalogue, or DAPO with filtered groups")
    model, gpus = MODELS[row["model"]], int(row["n_gpus"])
    tp, cp, ep, pp = ([*numbers(row["train_plan"].split("=")[1])[:5], 1, 1, 1, 1])[:4]
    if row["model"] == "LLAMA3.1_8B":
        tp, cp, ep, pp = 1, 1, 1, numbers(row["train_plan"].split("=")[1])[-1]
    longest, mean = numbers(row["seq_or_resp_len"])
    samples, batch = numbers(row["batch"])
    off = int((re.search(r"(\d)-step", row["algorithm"]) or [0, 0])[1]) if "Off" in row["algorithm"] else 0
    generations = 16 if "DeepSeek" in model else 32
    apart = (gpus // 2 if off == 1 else 64) if off else 0
    micro, ranks = max(1, longest // (mean + PROMPT)), max((gpus - apart) // (tp * cp * pp), 1)
    while micro > 1 and batch % (micro * ranks):
        micro -= 1
    nodes = gpus // (8 if "H100" in row["gpu"] else 4)
    flags: Flags = {"model": model, "gpus": gpus, "gpu": row["gpu"], "nodes": nodes}
    flags |= {"task": "grpo", "code": "megatron", "precision": row["precision"], "beta": 0.01}
    flags |= {"prompt_len": PROMPT, "completion_len": f"{mean}:{longest - PROMPT}", "generations": generations}
    flags |= {"prompts_per_step": samples // generations, "global_batch": batch, "micro_batch": micro}
    flags |= {"strategy": "zero1", "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": tp > 1}
    flags |= {"rollout": "server" if off else "colocate", "rollout_memory": 0.8 if off else 0.6, "steps_off": off}
    flags["rollout_tp"] = numbers(row["gen_plan"].split("=")[1])[0]
    flags["checkpointing"] = "none" if model in ("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B") else "full"
    flags |= {"rollout_gpus": apart} if off else {"rollout_sleep": True}
    kind = "dense" if "LLAMA" in row["model"] or "32B" in row["model"] else "experts"
    return flags, kind, f"{PROMPT} tokens of a prompt; generations, beta and recomputation of its recipes"


def of_verl(row: Row) -> tuple[Flags, str, str]:
    """Refuse a row of verl, and say what it lacks.

    Raises:
        NotAskable: always, as long as no row states how long completions are on average.
    """
    if "weight sync" in row["algorithm"]:
        raise NotAskable("a push of weights alone: its links are not named")
    if row["row_kind"].startswith("fits"):
        raise NotAskable("a batch that fits, without lengths")
    raise NotAskable("the mean length of completions is not stated, which decides a step")


# All rows, as the file keeps them.


def questions(collection: Path, checkout: Path) -> Iterator[dict[str, str]]:
    """Yield every row of the collection as this file keeps it."""
    with collection.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    for number, row in enumerate(rows, start=1):
        flags: Flags = {}
        kind = assumed = why_not = ""
        try:
            flags, kind, assumed = _question(row, checkout)
        except NotAskable as reason:
            why_not = str(reason)
        yield {
            "case": f"{row['framework'].partition(' ')[0].lower()}-{number}",
            **{name: row[name] for name in ("split", "model", "source")},
            "framework": row["framework"],
            "kind": kind or row["algorithm"],
            "question": json.dumps(flags) if flags else "",
            "seconds": row["step_time_s"] if row["step_time_s"] != "OOM" and row["gpu"] else "",
            "memory_gib": row["mem_gb_per_gpu"] if row["mem_gb_per_gpu"] != "OOM" else "",
            "ran": "no" if row["mem_gb_per_gpu"] == "OOM" else "yes",
            "assumed": assumed,
            "why_not": why_not,
        }


def _question(row: Row, checkout: Path) -> tuple[Flags, str, str]:
    if row["train_plan"] in A800_TABLE:
        return of_table(row)
    if row["framework"] == "ms-swift":
        return of_swift(row, checkout)
    if row["framework"].startswith("NeMo-RL"):
        return of_nemo_rl(row)
    if row["framework"] == "verl":
        return of_verl(row)
    raise NotAskable("no plan is stated")


def main() -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(questions(Path(sys.argv[1]), Path(sys.argv[2])))
    replace_text(PATH, text.getvalue())


if __name__ == "__main__":
    main()
