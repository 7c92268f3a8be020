"""Runs training scripts of public projects, unmodified, under `dsplan run`, and writes down what became of each.

    python -m scripts.peers.public_scripts fetch DIR            clone the projects at the commits below, make the data
    python -m scripts.peers.public_scripts run DIR              every script in every way, into the table of the docs
    python -m scripts.peers.public_scripts run DIR --only sft --ways zero2 killed

Nothing of the projects is part of this one. `fetch` needs git and the network, or `--mirrors FOLDER` with clones named
`owner+name`; models, tokenizers and data are made here (scripts/peers/public_data.py). Ways: free (nothing is asked
for), ddp, fsdp, zero2, zero3, and killed: a rank is killed with SIGKILL in the middle of a run that saves, and the
losses are compared with those of the undisturbed run of the same strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from hardware_db.files import replace_text
from scripts.peers.public_data import prepare

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("public_scripts.json")
WAYS = ("free", "ddp", "fsdp", "zero2", "zero3", "killed")
RANKS = 2
TIMEOUT_SECONDS = 300.0
_KILL_AT = 4
"""The step of the rank that is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A public repository at one commit."""

    name: str
    """`owner/name` on GitHub."""
    commit: str
    """The commit that was run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A line of a script that is not what it must be on this machine."""

    file: str
    """The file, relative to the project."""
    old: str
    """What stands there."""
    new: str
    """What it is replaced by."""
    why: str
    """The reason, for the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A script and how it is called."""

    name: str
    """The name in the table."""
    project: str
    """The key of its project in PROJECTS."""
    script: str
    """The file, relative to the project."""
    library: str
    """What it trains with."""
    arguments: tuple[str, ...] = ()
    """Its arguments; `{out}` is an output folder of the run, `{data}` the folder that it runs in."""
    edits: tuple[Edit, ...] = ()
    """What has to be changed for a CPU or for today's versions."""
    inside: bool = False
    """Whether it runs in its own folder and not in that of the data."""


PROJECTS: Mapping[str, Project] = {
    "accelerate": Project(name="huggingface/accelerate", commit="16cb6eb8"),
    "alpaca": Project(name="tatsu-lab/stanford_alpaca", commit="761dc5b"),
    "deepspeed-examples": Project(name="deepspeedai/DeepSpeedExamples", commit="45b4b715"),
    "lightning": Project(name="Lightning-AI/pytorch-lightning", commit="7f0c3436cd"),
    "nanochat": Project(name="karpathy/nanochat", commit="92d63d4"),
    "nanogpt": Project(name="karpathy/nanoGPT", commit="3adf61e1"),
    "peft": Project(name="huggingface/peft", commit="5d602fdbf"),
    "pytorch-examples": Project(name="pytorch/examples", commit="77f55b9"),
    "transformers": Project(name="huggingface/transformers", commit="v4.57.6"),
    "trl": Project(name="huggingface/trl", commit="f2cd57710"),
}

_TRAINER = ("--max_steps", "8", "--logging_steps", "1", "--output_dir", "{out}", "--report_to", "none", "--use_cpu")
_SAVES = ("--save_strategy", "no")
_TRL = (
    "--model_name_or_path",
    "tiny-llama",
    "--per_device_train_batch_size",
    "2",
    "--bf16",
    "false",
    *_TRAINER,
    *_SAVES,
)
_CLM = ("--train_file", "text.txt", "--validation_file", "text-val.txt", "--block_size", "64")
_EXAMPLES = "examples/pytorch"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="transformers run_clm",
        project="transformers",
        script=f"{_EXAMPLES}/language-modeling/run_clm.py",
        library="HF Trainer",
        arguments=(
            "--model_name_or_path",
            "tiny-gpt2",
            *_CLM,
            "--do_train",
            "--per_device_train_batch_size",
            "2",
            *_TRAINER,
            *_SAVES,
        ),
    ),
    Recipe(
        name="transformers run_glue",
        project="transformers",
        script=f"{_EXAMPLES}/text-classification/run_glue.py",
        library="HF Trainer",
        arguments=(
            *("--model_name_or_path", "bert-base-cased", "--train_file", "nyu-mll/glue/train.csv"),
            *("--validation_file", "nyu-mll/glue/validation.csv", "--do_train", "--max_seq_length", "64"),
            *("--per_device_train_batch_size", "4", *_TRAINER, *_SAVES),
        ),
    ),
    Recipe(
        name="transformers run_clm_no_trainer",
        project="transformers",
        script=f"{_EXAMPLES}/language-modeling/run_clm_no_trainer.py",
        library="accelerate",
        arguments=(
            *("--model_name_or_path", "tiny-gpt2", *_CLM, "--per_device_train_batch_size", "2"),
            *("--max_train_steps", "8", "--output_dir", "{out}"),
        ),
        edits=(
            Edit(
                file=f"{_EXAMPLES}/language-modeling/run_clm_no_trainer.py",
                old="DistributedType.TPU",
                new="DistributedType.XLA",
                why="accelerate 1.15 has no TPU any more",
            ),
        ),
    ),
    Recipe(
        name="TRL sft",
        project="trl",
        script="trl/scripts/sft.py",
        library="TRL",
        arguments=("--dataset_name", "chats", "--max_length", "64", *_TRL),
    ),
    Recipe(
        name="TRL sft, LoRA, packed",
        project="trl",
        script="trl/scripts/sft.py",
        library="TRL, PEFT",
        arguments=(
            "--dataset_name",
            "chats",
            "--max_length",
            "64",
            "--packing",
            "--use_peft",
            "--lora_target_modules",
            "q_proj",
            "v_proj",
            *_TRL,
        ),
    ),
    Recipe(
        name="TRL dpo",
        project="trl",
        script="trl/scripts/dpo.py",
        library="TRL",
        arguments=("--dataset_name", "preferences", "--max_length", "64", *_TRL),
    ),
    Recipe(
        name="TRL reward",
        project="trl",
        script="trl/scripts/reward.py",
        library="TRL",
        arguments=("--dataset_name", "preferences", "--max_length", "64", *_TRL),
    ),
    Recipe(
        name="PEFT sft",
        project="peft",
        script="examples/sft/train.py",
        library="TRL, PEFT",
        arguments=(
            *(
                "--dataset_name",
                "chats",
                "--splits",
                "train,test",
                "--dataset_text_field",
                "content",
                "--max_length",
                "64",
            ),
            *("--use_peft_lora", "True", "--lora_target_modules", "q_proj,v_proj", *_TRL),
        ),
    ),
    Recipe(
        name="alpaca train.py",
        project="alpaca",
        script="train.py",
        library="HF Trainer",
        arguments=(
            "--model_name_or_path",
            "tiny-llama",
            "--data_path",
            "alpaca.json",
            "--per_device_train_batch_size",
            "2",
            "--model_max_length",
            "64",
            *_TRAINER,
            *_SAVES,
        ),
        edits=(
            Edit(
                file="train.py",
                old="tokenizer=tokenizer, args=",
                new="processing_class=tokenizer, args=",
                why="transformers 5 has another name",
            ),
            Edit(
                file="utils.py",
                old="from openai import openai_object",
                new="",
                why="only its data generation needs a client of 2023",
            ),
            Edit(file="utils.py", old="import openai\n", new="", why="the same"),
        ),
    ),
    Recipe(
        name="accelerate nlp_example",
        project="accelerate",
        script="examples/nlp_example.py",
        library="accelerate",
        arguments=("--cpu",),
    ),
    Recipe(
        name="accelerate complete_nlp_example",
        project="accelerate",
        script="examples/complete_nlp_example.py",
        library="accelerate",
        arguments=("--cpu", "--output_dir", "{out}"),
    ),
    Recipe(
        name="Lightning transformer",
        project="lightning",
        script="examples/pytorch/basics/transformer.py",
        library="Lightning",
    ),
    Recipe(
        name="Lightning Fabric language_model",
        project="lightning",
        script="examples/fabric/language_model/train.py",
        library="Lightning Fabric",
    ),
)


def fetch(directory: Path, mirrors: Path | None) -> None:
    """Lay every project at its commit below `directory`, with the recipes' edits, and the data beside them."""
    for key, project in track(PROJECTS.items(), description="projects", console=Console(stderr=True)):
        place = directory / key
        if (place / ".git").exists():
            continue
        source = f"https://github.com/{project.name}"
        if mirrors is not None:
            source = str(mirrors / project.name.replace("/", "+") / "repo")
        _git("clone", "--quiet", "--no-checkout", source, str(place))
        _git("-C", str(place), "checkout", "--quiet", project.commit, "--", ".")
    for recipe in RECIPES:
        for edit in recipe.edits:
            path = directory / recipe.project / edit.file
            text = path.read_text()
            if edit.new not in text:
                replace_text(path, text.replace(edit.old, edit.new))
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    prepare(data)


def _git(*arguments: str) -> None:
    subprocess.run(("git", *arguments), check=True)


def run(directory: Path, recipe: Recipe, way: str) -> dict[str, Any]:
    """What became of a recipe in one way."""
    place = directory / "runs" / f"{recipe.name.replace(' ', '-').replace('/', '-')}-{way}"
    _remove(place)
    place.mkdir(parents=True)
    strategy = "zero2" if way == "killed" else way
    command = [sys.executable, "-m", "dsplan", "run", "--json", "--nproc", str(RANKS), "--run-dir", str(place / "run")]
    command += [] if strategy == "free" else ["--strategy", strategy]
    command += ["--checkpoint-steps", "2"] if way == "killed" else []
    script = directory / recipe.project / recipe.script
    values = {"out": str(place / "out"), "data": str(directory / "data")}
    command += [str(script), *(argument.format(**values) for argument in recipe.arguments)]
    with (place / "stdout").open("w") as out, (place / "stderr").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=script.parent if recipe.inside else directory / "data",
            env=_environment(directory),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            killed = way == "killed" and _kill_a_rank(process, place / "run")
            process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    found = _outcome(place, process.wait())
    if way == "killed":
        found["killed_at"] = _KILL_AT if killed else None
        found["loss_difference"] = _difference(directory, recipe, place)
    return found


def _environment(directory: Path) -> dict[str, str]:
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hub"),
        "OMP_NUM_THREADS": "1",
        "DSPLAN_DATABASE": str(directory / "runs.sqlite"),
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "disabled",
    }
    return {**os.environ, **own}


def _kill_a_rank(process: subprocess.Popen[bytes], run_directory: Path) -> bool:
    """Kill the last rank once it has done its fourth step; whether that came before the end."""
    metrics = run_directory / f"metrics-rank{RANKS - 1}.jsonl"
    ends = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        if any(step >= _KILL_AT for step in _losses(metrics)):
            pid = int((run_directory / f"rank{RANKS - 1}.pid").read_text().split()[0])
            os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def _losses(metrics: Path) -> dict[int, float]:
    """The loss of every step of a rank; of a step that was made again, the last one."""
    found: dict[int, float] = {}
    if metrics.exists():
        for line in metrics.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # being written
                continue
            if row.get("event") == "step" and row.get("loss") is not None:
                found[row["global_step"]] = row["loss"]
    return found


def _difference(directory: Path, recipe: Recipe, place: Path) -> float | None:
    """The largest difference of a step's loss from the undisturbed run of the same strategy."""
    undisturbed = place.with_name(place.name.replace("-killed", "-zero2")) / "run"
    worst = None
    for rank in range(RANKS):
        ours = _losses(place / "run" / f"metrics-rank{rank}.jsonl")
        theirs = _losses(undisturbed / f"metrics-rank{rank}.jsonl")
        if not theirs or ours.keys() != theirs.keys():
            return None
        worst = max([worst or 0.0, *(abs(ours[step] - theirs[step]) for step in ours)])
    return worst


def _outcome(place: Path, status: int) -> dict[str, Any]:
    lines = [line for line in (place / "stderr").read_text().splitlines() if line.startswith(("error:", "dsplan:"))]
    try:
        report = json.loads((place / "stdout").read_text())
    except ValueError:
        return {
            "status": status,
            "outcome": "refused" if status == 2 else "failed",
            "reason": lines[-1] if lines else "",
        }
    plan, measured = report.get("plan") or {}, report.get("measured") or {}
    return {
        "status": status,
        "outcome": report["outcome"],
        "reason": report["reason"],
        "strategy": (plan.get("plan") or {}).get("strategy"),
        "backend": (plan.get("plan") or {}).get("backend"),
        "steps": measured.get("steps"),
        "first_loss": measured.get("first_loss"),
        "last_loss": measured.get("last_loss"),
        "predicted_bytes": (plan.get("memory") or {}).get("peak_allocated_bytes"),
        "measured_bytes": measured.get("peak_allocated_bytes"),
        "predicted_seconds": (plan.get("time") or {}).get("step_seconds"),
        "measured_seconds": measured.get("step_seconds"),
        "restarts": len(report.get("attempts") or [1]) - 1,
    }


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fetch", "run", "table"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mirrors", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    asked = parser.parse_args()
    directory = asked.directory.absolute()
    if asked.what == "fetch":
        fetch(directory, asked.mirrors)
    if asked.what == "run":
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        chosen = [recipe for recipe in RECIPES if not asked.only or any(word in recipe.name for word in asked.only)]
        for recipe in chosen:
            for way in asked.ways:
                found = run(directory, recipe, way)
                print(f"{recipe.name} {way}: {json.dumps(found)}", flush=True)
                results.setdefault(recipe.name, {})[way] = found
                replace_text(RESULTS, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
