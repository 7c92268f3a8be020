"""Hands every emitted config of trainers of fine-tuning and post-training to that trainer's own parser.

    python -m scripts.peers.emitted fetch DIR      the trainers' sources at the commits of planner/emit/trainers.yaml
    python -m scripts.peers.emitted run DIR        emits plans, parses them there, and prints a table of what was taken

`fetch` needs git and the network, or `--mirrors FOLDER` with clones named `owner+name`; it puts the packages that the
parsers need and this environment lacks into DIR/site. `run` needs torch, transformers, accelerate, DeepSpeed and TRL.
Nothing is trained and no model is loaded: what only a GPU would import is replaced, nothing that reads a config is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsplan.api import estimate
from hardware_db.errors import DsplanError
from planner.emit import emit
from planner.emit.trainers import trainer_of
from planner.types.plan import Plan
from scripts.peers.config_files import lay_out

PACKAGES = ("omegaconf==2.3.0", "hydra-core==1.3.2", "antlr4-python3-runtime==4.9.3", "json-repair", "fire", "addict")
"""Packages that the parsers import, installed without what they depend on."""
_FORMATS = ("axolotl", "llama-factory", "ms-swift", "trl", "torchtune", "verl", "openrlhf", "nemo-rl")
_PARSER = Path(__file__).with_name("emitted_parse.py")
_ROOT = Path(__file__).resolve().parents[2]

_STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero1", "zero2", "zero3")
_WAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {"precision": "bf16-pure"},
    {"precision": "fp32", "checkpointing": "full"},
    {"checkpointing": "full", "offload": "all"},
    {"offload": "optimizer"},
    {"optimizer": "adamw-fused", "attention": "flash", "loss": "fused"},
    {"optimizer": "adamw-8bit", "method": "lora", "lora_targets": "attention"},
    {"method": "qlora", "checkpointing": "full"},
    {"method": "lora", "precision": "bf16-pure", "loss": "chunked"},
    {"task": "dpo", "optimizer": "adamw-fused", "loss": "tiled"},
    {"task": "dpo", "optimizer": "adamw-fused", "loss": "plain"},
    {"task": "kto", "loss": "plain"},
    {"task": "orpo", "loss": "plain", "method": "dora"},
    {"task": "reward", "loss": "plain"},
    {"task": "grpo", "loss": "tiled", "optimizer": "adamw-fused", "rollout": "colocate"},
    {"task": "grpo", "loss": "plain", "optimizer": "adamw-fused", "rollout": "colocate", "beta": 0.04},
    {"task": "grpo", "loss": "plain", "optimizer": "adamw-fused", "rollout": "server", "rollout_gpus": 8},
    {"task": "ppo", "loss": "plain", "optimizer": "adamw-fused", "rollout": "colocate"},
)


def plans() -> Iterator[tuple[str, Plan]]:
    """Yield plans by a name that says what they are; those that contradict themselves are left out."""
    for strategy, settings in itertools.product(_STRATEGIES, _WAYS):
        gpus, nodes = (
            (1, 1) if strategy == "single" else (16, 2) if strategy == "hsdp" or "rollout" in settings else (8, 1)
        )
        gpus += settings.get("rollout_gpus", 0)
        flags = {"model": "llama-3-8b", "gpu": "h100", "gpus": gpus, "nodes": nodes + (gpus > 16), "micro_batch": 2}
        flags |= {"seq_len": 2048} if settings.get("task") not in ("grpo", "ppo") else {}
        try:
            yield (
                " ".join((strategy, *map(str, settings.values()))),
                estimate(**{**flags, **settings, "strategy": strategy}),
            )
        except DsplanError:
            continue


def emitted(format: str, every: Sequence[tuple[str, Plan]]) -> dict[str, dict[str, str]]:
    """Return the files of every plan that a format has a form of, by the plan's name."""
    files = {}
    for name, plan in every:
        if format == "torchtune":  # whose modules are plain torch
            plan = replace(plan, workload={**plan.workload, "code": "torch"})
        try:
            files[name] = emit(plan, format)
        except DsplanError:
            continue
    return files


def sources() -> dict[str, tuple[str, str]]:
    """Return each format's repository and commit."""
    read = {format: trainer_of(format).source.split()[0].split("@") for format in _FORMATS}
    return {format: (repository, commit) for format, (repository, commit) in read.items()}


def parse(format: str, files: Mapping[str, Mapping[str, str]], directory: Path) -> dict[str, str]:
    """Return, by plan, what a trainer's own parser complains of; nothing where it takes the files."""
    checkout = directory / sources()[format][0].replace("/", "+")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, str(_PARSER), format, str(checkout), str(directory / "site")]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            words, input=json.dumps(files), capture_output=True, text=True, cwd=folder, env=environment
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        return dict.fromkeys(files, f"the parser did not start: {lines[0]}")
    complaints: dict[str, str] = json.loads(process.stdout.strip().splitlines()[-1])
    return complaints


def main() -> None:
    """Lay out the trainers' sources, or parse with them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("do", choices=("fetch", "run"))
    options.add_argument("directory", type=Path)
    options.add_argument("--mirrors", type=Path)
    options.add_argument("--only", default="")
    given = options.parse_args()
    if given.do == "fetch":
        given.directory.mkdir(parents=True, exist_ok=True)
        for repository, commit in sources().values():
            lay_out(repository, commit, given.directory, given.mirrors)
        site = ["--target", str(given.directory / "site")]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *site, *PACKAGES], check=True)
        return
    every = list(plans())
    print(f"{len(every)} plans\n\n| format | emitted | taken by its own parser |\n|---|---|---|")
    failed = 0
    for format in given.only.split(",") if given.only else _FORMATS:
        files = emitted(format, every)
        complaints = parse(format, files, given.directory.resolve())
        failed += len(complaints)
        print(f"| {format} | {len(files)} | {len(files) - len(complaints)} |", flush=True)
        for name, line in complaints.items():
            print(f"{format}, {name}: {line}", file=sys.stderr)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
