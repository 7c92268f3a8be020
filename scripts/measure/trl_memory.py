"""Measures the memory of TRL's trainers on two CPU ranks under `dsplan run`, strategy by strategy.

    python -m scripts.measure.trl_memory [NAME ...] [--again]     what has no row yet, of these trainers and strategies

A small Llama is trained by TRL's own trainer, with its own settings but for lengths, batches and fp32, by every
strategy that a script can have. Live bytes are counted as `scripts.measure.memory` counts them, over the whole third
step, generation too. Rows go to hardware_db/measurements/trl_cpu.csv as each run ends.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hardware_db.files import replace_text
from hardware_db.measured_rows import SHIPPED
from hardware_db.probe import probe
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import Priced, price
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from scripts.measure.machines import measured_cluster, record

ROWS = SHIPPED / "trl_cpu.csv"
TRAINERS = ("sft", "sft-lora", "dpo", "kto", "reward", "grpo")
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
MODEL: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
PROMPT, COMPLETION, GENERATED = 24, 40, 16
"""Tokens of a prompt, of an answer in the data, and of a generated one at most."""
LORA = {"r": 16, "target_modules": "all-linear"}
GENERATION = {"num_generations": 2, "max_completion_length": GENERATED, "steps_per_generation": 2}
_RANKS, _SAMPLES, _SECONDS = 2, 64, 1800


# The rows.


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlRun:
    """One run: the plan's own words, and bytes of the busiest rank."""

    trainer: str
    strategy: str
    backend: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    optimizer: str
    activation_checkpointing: str
    sync_each_micro_batch: int
    """1, or 0 where gradients are reduced in the last micro-batch alone, as FSDP may keep them."""
    peak_bytes: int
    resident_bytes: int
    """Alive between steps."""
    planned_bytes: int
    """Those of the plan that the run was given."""
    torch: str
    transformers: str
    trl: str
    peft: str
    cpu: str
    cores: int


def read_runs() -> list[TrlRun]:
    """Return the rows that come with dsplan."""
    if not ROWS.exists():
        return []
    numbers = {item.name for item in fields(TrlRun) if item.type == "int"}
    with ROWS.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return [TrlRun(**{name: int(text) if name in numbers else text for name, text in row.items()}) for row in rows]


def write_runs(runs: Iterable[TrlRun]) -> None:
    """Replace them, in the order of trainers and strategies."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(TrlRun)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, sorted(runs, key=_order)))
    replace_text(ROWS, text.getvalue())


def _order(run: TrlRun) -> tuple[int, int]:
    return TRAINERS.index(run.trainer), STRATEGIES.index(run.strategy)


def predicted_bytes(run: TrlRun) -> int:
    """Return what `dsplan estimate` says of a row's peak today."""
    return _priced(run).memory.peak_allocated_bytes


def job_for(run: TrlRun) -> Job:
    """Return the row as the cost model sees it."""
    return _priced(run).job


def _priced(run: TrlRun) -> Priced:
    task = run.trainer.partition("-")[0]
    work: dict[str, Any] = {"task": task, "precision": "fp32", "optimizer": run.optimizer}
    chosen: dict[str, Any] = {"strategy": run.strategy, "backend": run.backend}
    if task == "grpo":
        work |= {"prompt_len": PROMPT, "completion_len": str(GENERATED), "generations": GENERATION["num_generations"]}
        work["rollout"] = "hf"
        chosen["steps_per_generation"] = GENERATION["steps_per_generation"]
    else:
        work["seq_len"] = PROMPT + COMPLETION
    if run.trainer == "sft-lora":
        work |= {"method": "lora", "lora_rank": LORA["r"], "lora_targets": LORA["target_modules"]}
        work["load_dtype"] = "fp32"
    facts = facts_from_config({"model_type": "llama", **MODEL}, "llama-35m")
    request = make_request(facts, measured_cluster("cpu", _RANKS), WorkOptions(**work))
    options = ExactOptions(
        micro_batch=run.micro_batch_size,
        grad_accum=run.gradient_accumulation_steps,
        checkpointing=run.activation_checkpointing,  # type: ignore[arg-type]
        **chosen,
    )
    request, configuration = exact(request, options)
    configuration = replace(configuration, sync_each_micro_batch=bool(run.sync_each_micro_batch))
    return price(request, configuration)


# One rank of a run.


def train(name: str, folder: str, out: str) -> None:
    """Train as one rank, and write down what its third step reached."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, set_seed

    set_seed(0)
    torch.set_num_threads(1)
    kind, rest = name.partition("-")[0], {}
    settings: dict[str, Any] = {"output_dir": "out", "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False}
    settings |= GENERATION if kind == "grpo" else {"max_length": PROMPT + COMPLETION}
    if kind == "grpo":
        rest["reward_funcs"] = lambda completions, **_: [float(len(set(text))) for text in completions]
    if name == "sft-lora":
        from peft import LoraConfig

        rest["peft_config"] = LoraConfig(**LORA, task_type="CAUSAL_LM")
    stem = kind.capitalize() if kind == "reward" else kind.upper()
    trainer = getattr(trl, f"{stem}Trainer")(
        model=folder,
        args=getattr(trl, f"{stem}Config")(**settings),
        train_dataset=Dataset.from_dict(_data(kind)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **rest,
    )
    trainer.add_callback(_counting(Path(out)))
    trainer.train()


def _data(kind: str) -> dict[str, Any]:
    prompts, good, bad = (
        [_text(row + shift, length) for row in range(_SAMPLES)]
        for shift, length in ((0, PROMPT), (1000, COMPLETION), (2000, COMPLETION))
    )
    if kind == "sft":
        return {"text": [f"{prompt} {text}" for prompt, text in zip(prompts, good, strict=True)]}
    if kind == "kto":
        return {"prompt": prompts, "completion": good, "label": [row % 2 == 0 for row in range(_SAMPLES)]}
    return {"prompt": prompts} | ({} if kind == "grpo" else {"chosen": good, "rejected": bad})


def _text(seed: int, words: int) -> str:
    return " ".join(f"w{4 + (seed * 7919 + word * 104_729) % 31_000}" for word in range(words))


def _counting(out: Path) -> Any:
    """Return a callback that counts live bytes from the second step on, and their peak in the third."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from strategies.telemetry.memory_report import reachable_tensors
    from strategies.tracing.storage_tracker import StorageTracker

    class Counting(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 1:
                gc.collect()
                self.tracker = StorageTracker(reachable_tensors())
                self.tracker.__enter__()
            if state.global_step == 2:
                self.resident = self.tracker.live_bytes
                self.tracker.restart_peak()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 3:
                rows: list[Any] = [None] * dist.get_world_size()
                counted = {"peak": self.tracker.peak_bytes, "resident": self.resident}
                self.tracker.__exit__()
                dist.all_gather_object(rows, counted)
                if dist.get_rank() == 0:
                    replace_text(out, json.dumps(rows))

    return Counting()


# All runs.


def prepare(directory: Path) -> None:
    """Write the model and a tokenizer of which every word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, MODEL["vocab_size"]))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(directory)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**MODEL, **ids)).save_pretrained(directory)


def measure(trainer: str, strategy: str, folder: Path) -> TrlRun:
    """Run one trainer by one strategy, in a directory of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "dsplan", "run", "--nproc", str(_RANKS), "--strategy", strategy, "--json"]
        command += ["--retries", "0", __file__, "--train", trainer, str(folder), "rows.json"]
        ended = subprocess.run(
            command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=_SECONDS
        )
        ranks = json.loads(Path(directory, "rows.json").read_text(encoding="utf-8"))
    return row_of(trainer, json.loads(ended.stdout)["plan"], ranks)


def row_of(trainer: str, plan: Mapping[str, Any], ranks: Sequence[Mapping[str, int]]) -> TrlRun:
    """Return the row of a run that had this plan."""
    names = ("strategy", "backend", "micro_batch_size", "gradient_accumulation_steps", "optimizer")
    return TrlRun(
        trainer=trainer,
        **{name: plan["plan"][name] for name in (*names, "activation_checkpointing")},
        sync_each_micro_batch=int(plan["plan"]["sync_each_micro_batch"]),
        peak_bytes=max(rank["peak"] for rank in ranks),
        resident_bytes=max(rank["resident"] for rank in ranks),
        planned_bytes=round(plan["memory"]["peak_allocated_bytes"]),
        **record(probe()),
        **{name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    )


def main(arguments: list[str]) -> None:
    """Measure what has no row, or all that is named."""
    again, names = "--again" in arguments, {word for word in arguments if not word.startswith("-")}
    with tempfile.TemporaryDirectory() as folder:
        for trainer in TRAINERS:
            for strategy in STRATEGIES:
                runs = {(run.trainer, run.strategy): run for run in read_runs()}
                if (names and not names & {trainer, strategy}) or ((trainer, strategy) in runs and not again):
                    continue
                if not any(Path(folder).iterdir()):
                    prepare(Path(folder))
                runs[trainer, strategy] = measure(trainer, strategy, Path(folder))
                write_runs(runs.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:5])
    else:
        main(sys.argv[1:])
