"""Has `dsplan check --fix` mend real configs that do not fit, and the trainers' own parsers read what came out.

    python -m scripts.peers.config_files fetch DIR           the projects' configs, at their commits
    python -m scripts.peers.fixes DIR [--mirrors FOLDER]     a line for every case below

A case counts as mended if the changed file fits by the prediction and the trainer's own parser takes it. Parsers are
TRL's and `TrainingArguments` as they are installed, and, of the projects' sources at their commits, axolotl's pydantic
schema, LLaMA-Factory's dataclasses under `HfArgumentParser`, OpenRLHF's `argparse` (taken from its script, whose other
imports need Ray and vLLM), verl's hydra schema with the script's overrides, and NeMo-RL's loader; YAML of torchtune,
llm-foundry, nanotron and Automodel goes through OmegaConf or PyYAML, which is what reads it there. omegaconf and
hydra-core have to be importable (`PYTHONPATH`); they are no dependencies of this project.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from dsplan.checking import Checked, check_files
from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from planner.read.documents import read_source
from planner.read.launchers import argument_settings, launches
from planner.read.shell import parse_script
from scripts.peers.config_files import PROJECTS, _mirror

_NEMO = "examples/configs/recipes/llm"
CASES: tuple[tuple[str, str, str, int | None], ...] = (
    ("axolotl-ai-cloud/axolotl", "examples/LiquidAI/lfm2-350m-fft.yaml", "RTX-3060-12GB", 8),
    ("axolotl-ai-cloud/axolotl", "examples/llama-3/fft-8b.yaml", "A100-SXM4-40GB", 8),
    ("axolotl-ai-cloud/axolotl", "examples/gpt-oss/gpt-oss-20b-sft-lora-singlegpu.yaml", "A100-SXM4-40GB", 8),
    ("hiyouga/LLaMA-Factory", "examples/extras/apollo/llama3_full_sft.yaml", "A100-SXM4-40GB", 8),
    ("hiyouga/LLaMA-Factory", "examples/extras/eaft/qwen25_05b_eaft_full.yaml", "RTX-3060-12GB", 8),
    ("hiyouga/LLaMA-Factory", "examples/extras/galore/llama3_full_sft.yaml", "A100-SXM4-40GB", 8),
    ("modelscope/ms-swift", "examples/megatron/benchmark/deepspeed.sh", "A100-SXM4-40GB", None),
    ("modelscope/ms-swift", "examples/train/flash_attention_3/transformers.sh", "A100-SXM4-40GB", None),
    ("huggingface/trl", "examples/cli_configs/example_config.yaml", "RTX-3060-12GB", 8),
    ("pytorch/torchtune", "recipes/configs/dev/11B_lora_multi_dataset.yaml", "RTX-3060-12GB", 8),
    ("pytorch/torchtune", "recipes/configs/llama3_1/8B_full.yaml", "RTX-3060-12GB", 8),
    ("pytorch/torchtune", "recipes/configs/llama3_2_vision/90B_lora.yaml", "A100-SXM4-40GB", 8),
    ("pytorch/torchtune", "recipes/configs/qwen2_5/72B_lora.yaml", "RTX-4090", 8),
    ("NVIDIA-NeMo/RL", "examples/configs/grpo_math_8B.yaml", "A100-SXM4-40GB", None),
    (
        "NVIDIA-NeMo/RL",
        "examples/configs/recipes/llm/dpo-llama3.1-8b-instruct-4n8g-fsdp2tp4.yaml",
        "A100-SXM4-40GB",
        None,
    ),
    ("volcengine/verl", "examples/grpo_trainer/run_qwen2-7b_math.sh", "A100-SXM4-40GB", None),
    ("OpenRLHF/OpenRLHF", "examples/scripts/train_dpo_llama.sh", "RTX-4090", 8),
    ("huggingface/nanotron", "examples/config_qwen.yaml", "A100-SXM4-40GB", None),
    ("huggingface/nanotron", "examples/config_tiny_llama.yaml", "A100-SXM4-40GB", None),
    ("mosaicml/llm-foundry", "scripts/train/yamls/finetune/1b_local_data_sft.yaml", "RTX-3060-12GB", 8),
    ("mosaicml/llm-foundry", "scripts/train/yamls/finetune/llama-3-8b_domain_adapt.yaml", "A100-SXM4-40GB", 8),
    ("NVIDIA-NeMo/Automodel", "examples/llm_finetune/falcon/falcon_h1_7b_instruct_squad.yaml", "A100-SXM4-80GB", 8),
)
"""Project, file, the card that it does not fit on, and how many of them where the file does not say.

Two files that stood here do not: verl's `run_cispo_qwen2_5_0_5b_gsm8k.sh`, which hydra refuses as it is published (it
overrides `actor_rollout_ref.model.torch_dtype`, which verl's schema lacks, without a `+`), and NeMo-RL's
`audio_grpo_3B_megatron.yaml`, for which no plan with keys in the file fits (Megatron's degrees stay as they are).
"""


def mend(path: Path, gpu: str, gpus: int | None) -> dict[str, Any]:
    """Return what became of one file: whether it failed, what changed, and whether the changed file fits.

    The file is changed in its place, which is a copy's.
    """
    hardware = {"gpu": gpu} | ({} if gpus is None else {"gpus": gpus})
    before = check_files([path], hardware=hardware)
    row: dict[str, Any] = {"digest": hashlib.sha256(path.read_bytes()).hexdigest()[:12]}
    row |= {"format": before.reading.format, "failed": before.status == 1}
    better = before.audit.better
    if better is None or not better.texts or before.status != 1:
        return row | {"outcome": "no diff"}
    row["parser_before"] = take(before.reading.format, path)[1]
    for name, (_, new) in better.texts.items():
        Path(name).write_text(new, encoding="utf-8")
    after = check_files([path], hardware=hardware)
    fits = after.audit.plan is not None and after.audit.plan.verdict != "does_not_fit"
    row |= {"fits": fits, "lines": _lines(better.diff), "keys": _keys(better.diff)}
    row["need"] = [_need(item) for item in (before, after)]
    row["parser"] = take(before.reading.format, path)
    if row["parser_before"]:
        return row | {"outcome": "fits, and its parser refuses the original too" if row["fits"] else "not mended"}
    return row | {"outcome": "mended" if row["fits"] and row["parser"][1] == "" else "not mended"}


def _need(checked: Checked) -> int:
    assert checked.audit.plan is not None
    memory = checked.audit.plan.memory
    return memory.device_needed_bytes or memory.device_used_upper_bytes


def _lines(diff: str) -> int:
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff.splitlines())


def _keys(diff: str) -> list[str]:
    """Return the last words of the keys on changed lines."""
    keys = set()
    for line in diff.splitlines():
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip():
            match = re.search(r"([\w-]+)\s*[:= ]\s*\S*\s*\\?$", line[1:].split("#")[0].rstrip())
            keys.add(match[1] if match else line[1:].strip())
    return sorted(keys)


# The trainers' own parsers: what parses, and what it said.


_SOURCES: dict[str, Path] = {}
"""Where the sources of projects lie that parsers are taken from."""


def take(format: str, path: Path) -> tuple[str, str]:
    """Return which parser read a file, and its complaint; empty where it took the file."""
    name, parse = _PARSERS.get(format, ("", None))
    if parse is None:
        return "none", "no parser"
    code = f"import json, sys\nfrom scripts.peers import fixes\nfixes.{parse}(sys.argv[1], json.loads(sys.argv[2]))"
    sources = json.dumps({project: str(folder) for project, folder in _SOURCES.items()})
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "DISABLE_VERSION_CHECK": "1", "PYTHONPATH": paths}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), sources], capture_output=True, text=True, env=environment, check=False
    )
    lines = (ended.stderr or ended.stdout).strip().splitlines()
    return name, "" if ended.returncode == 0 else (lines[-1] if lines else "failed")[:200]


def by_omegaconf(path: str, sources: dict[str, str]) -> None:
    """Read YAML as torchtune and llm-foundry do."""
    from omegaconf import OmegaConf

    OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def by_yaml(path: str, sources: dict[str, str]) -> None:
    """Read YAML as nanotron and Automodel do."""
    import yaml

    assert isinstance(yaml.safe_load(Path(path).read_text("utf-8")), dict)


def by_nemo(path: str, sources: dict[str, str]) -> None:
    """Read YAML by NeMo-RL's own loader, with what it builds on."""
    space: dict[str, Any] = {"__name__": "config"}
    exec(compile(Path(sources["NVIDIA-NeMo/RL"], "nemo_rl/utils/config.py").read_text(), "config", "exec"), space)
    space["load_config"](path)


def by_trl(path: str, sources: dict[str, str]) -> None:
    """Read YAML by the parser of TRL's own SFT script."""
    from trl.scripts.sft import make_parser

    make_parser().parse_args_and_config(["--config", path, "--output_dir", "out", "--bf16", "false"])


def by_arguments(path: str, sources: dict[str, str]) -> None:
    """Read a script's flags by `TrainingArguments`; of ms-swift they are the base of its own."""
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    settings, _ = argument_settings([*_launch_words(path)], read_source(Path(path)))
    fields = {item.name for item in Seq2SeqTrainingArguments.__dataclass_fields__.values()}
    flags = [word for item in settings if item.key in fields and item.key != "deepspeed" for word in _spelt(item)]
    HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses([*flags, "--bf16", "false"])


def _launch_words(path: str) -> Any:
    source = read_source(Path(path))
    return next(iter(launches(parse_script(source).commands, source))).arguments


def _spelt(item: Any) -> list[str]:
    values = item.value if isinstance(item.value, list) else [item.value]
    return [f"--{item.key}", *map(str, values)]


def by_factory(path: str, sources: dict[str, str]) -> None:
    """Read YAML by LLaMA-Factory's dataclasses, as its `_parse_train_args` does."""
    import yaml
    from transformers import HfArgumentParser

    sys.path.insert(0, f"{sources['hiyouga/LLaMA-Factory']}/src")
    from llamafactory.hparams.data_args import DataArguments
    from llamafactory.hparams.finetuning_args import FinetuningArguments
    from llamafactory.hparams.generating_args import GeneratingArguments
    from llamafactory.hparams.model_args import ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments

    values = yaml.safe_load(Path(path).read_text("utf-8"))
    values.pop("warmup_ratio", None)  # of transformers before 5.9, which it asks for
    values |= {"bf16": False, "fp16": False, "deepspeed": None, "report_to": "none"}  # no GPU, no DeepSpeed run here
    kinds = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
    HfArgumentParser(kinds).parse_dict(values)


def by_axolotl(path: str, sources: dict[str, str]) -> None:
    """Read YAML by axolotl's pydantic schema."""
    import yaml

    sys.path.insert(0, f"{sources['axolotl-ai-cloud/axolotl']}/src")
    from axolotl.utils.schemas.config import AxolotlInputConfig

    AxolotlInputConfig(**yaml.safe_load(Path(path).read_text("utf-8")))


def by_openrlhf(path: str, sources: dict[str, str]) -> None:
    """Read a script's flags by the parser of the module that it starts, whose other imports stay out."""
    source = read_source(Path(path))
    launch = next(iter(launches(parse_script(source).commands, source)))
    module = Path(sources["OpenRLHF/OpenRLHF"], *launch.program.split(".")).with_suffix(".py")
    body = next(node for node in ast.parse(module.read_text()).body if isinstance(node, ast.If)).body
    last = next(number for number, node in enumerate(body) if "parse_args" in ast.unparse(node))
    parser = ast.Module(body=body[: last + 1], type_ignores=[])
    sys.argv = ["train", *(word.text for word in launch.arguments)]
    space = {"argparse": argparse, "os": os, "datetime": datetime.datetime, "__name__": "train"}
    exec(compile(ast.fix_missing_locations(parser), str(module), "exec"), space)


def by_verl(path: str, sources: dict[str, str]) -> None:
    """Read a script's overrides by hydra, over verl's own schema."""
    from hydra import compose, initialize_config_dir

    words = [word.text for word in _launch_words(path) if word.is_resolved and "=" in word.text]
    folder = str(Path(sources["volcengine/verl"], "verl/trainer/config").resolve())
    with initialize_config_dir(folder, version_base=None):
        compose(config_name="ppo_trainer", overrides=words)


_PARSERS: dict[str, tuple[str, str]] = {
    "axolotl": ("axolotl's pydantic schema", by_axolotl.__name__),
    "llama-factory": ("LLaMA-Factory's dataclasses", by_factory.__name__),
    "ms-swift": ("`TrainingArguments`", by_arguments.__name__),
    "trl": ("TRL's parser", by_trl.__name__),
    "torchtune": ("OmegaConf", by_omegaconf.__name__),
    "llm-foundry": ("OmegaConf", by_omegaconf.__name__),
    "nanotron": ("PyYAML", by_yaml.__name__),
    "automodel": ("PyYAML", by_yaml.__name__),
    "nemo-rl": ("NeMo-RL's loader", by_nemo.__name__),
    "openrlhf": ("OpenRLHF's argparse", by_openrlhf.__name__),
    "verl": ("hydra over verl's schema", by_verl.__name__),
}
_FOR_PARSERS = (
    "axolotl-ai-cloud/axolotl",
    "hiyouga/LLaMA-Factory",
    "NVIDIA-NeMo/RL",
    "OpenRLHF/OpenRLHF",
    "volcengine/verl",
)


def _extract(directory: Path, mirrors: Path | None, into: Path) -> None:
    """Lay the sources that parsers are taken from below a folder."""
    for name in _FOR_PARSERS:
        mirror = _mirror(name, mirrors, directory)
        archive = subprocess.run(
            ["git", "-C", str(mirror), "archive", PROJECTS[name][0]], check=True, capture_output=True
        ).stdout
        folder = into / name.replace("/", "+")
        folder.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive)) as content:
            content.extractall(folder, filter="data")
        _SOURCES[name] = folder


def main() -> None:
    """Mend every case, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mirrors", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="Write every row there, as JSON.")
    parser.add_argument("--only", nargs="+", default=[], metavar="OWNER/NAME")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _extract(arguments.directory, arguments.mirrors, Path(folder))
        base = Path.cwd()
        cases = [case for case in CASES if not arguments.only or case[0] in arguments.only]
        for number, (project, path, gpu, gpus) in enumerate(cases):
            copied = Path(folder, f"case-{number}")
            shutil.copytree(arguments.directory / project.replace("/", "+"), copied)
            os.chdir(copied)
            try:
                row = mend(Path(path), gpu, gpus)
            except DsplanError as error:
                row = {"outcome": "not read", "why": str(error)}
            finally:
                os.chdir(base)
            rows.append({"project": project, "gpu": gpu, **row})
            print(
                project, path, gpu, *(f"{key}={row.get(key)}" for key in ("outcome", "fits", "lines", "keys", "parser"))
            )
    if arguments.out is not None:
        replace_text(arguments.out, json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(f"{sum(row['outcome'] == 'mended' for row in rows)} of {len(rows)} mended")


if __name__ == "__main__":
    main()
