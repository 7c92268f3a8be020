"""Reads the keys of trainers' configs, with their defaults, from the trainers' own sources: planner/read/trainers.json.

    python -m scripts.generate.trainer_keys MIRRORS

MIRRORS has clones named `owner+name` (or `owner+name/repo`), bare or not; their HEAD is read, whose commit is written
beside the keys. Nothing is imported: classes and calls of `add_argument` are read with `ast`. A default that is no
literal is left out.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware_db.files import replace_text

TARGET = Path(__file__).resolve().parents[2] / "planner" / "read" / "trainers.json"
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "accelerate": (
        "huggingface/accelerate",
        (
            "src/accelerate/commands/config/config_args.py",
            "src/accelerate/commands/launch.py",
            "src/accelerate/utils/dataclasses.py",
        ),
    ),
    "axolotl": (
        "axolotl-ai-cloud/axolotl",
        ("src/axolotl/utils/schemas/", "src/axolotl/integrations/"),
    ),
    "deepspeed": (
        "deepspeedai/DeepSpeed",
        (
            "deepspeed/runtime/config.py",
            "deepspeed/runtime/constants.py",
            "deepspeed/runtime/zero/config.py",
            "deepspeed/runtime/zero/offload_config.py",
        ),
    ),
    "huggingface": ("transformers", ("training_args.py",)),
    "llama-factory": ("hiyouga/LLaMA-Factory", ("src/llamafactory/hparams/",)),
    "megatron": (
        "NVIDIA/Megatron-LM",
        (
            "megatron/training/arguments.py",
            "megatron/training/config/",
            "megatron/core/transformer/transformer_config.py",
            "megatron/core/model_parallel_config.py",
            "megatron/core/optimizer/optimizer_config.py",
            "megatron/core/distributed/distributed_data_parallel_config.py",
        ),
    ),
    "megatron-swift": (
        "modelscope/ms-swift",
        ("swift/megatron/arguments/megatron_args.py", "swift/megatron/arguments/", "swift/arguments/"),
    ),
    "ms-swift": (
        "modelscope/ms-swift",
        ("swift/arguments/", "swift/megatron/arguments/", "swift/rlhf_trainers/", "swift/trainers/arguments.py"),
    ),
    "openrlhf": ("OpenRLHF/OpenRLHF", ("openrlhf/cli/",)),
    "torchtitan": ("pytorch/torchtitan", ("torchtitan/config/configs.py",)),
    "trl": ("huggingface/trl", ("trl/trainer/", "trl/scripts/")),
}
"""Each trainer's repository, and the files and folders in it that declare its keys; a name without an owner is that of
an installed distribution."""


def git(mirror: Path, *arguments: str) -> str:
    """Return what git prints of a clone."""
    return subprocess.run(
        ["git", "-C", str(mirror), *arguments], check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout


def mirror_of(mirrors: Path, name: str) -> Path | None:
    """Return the clone of a repository, None where there is none."""
    base = mirrors / name.replace("/", "+")
    return next(
        (folder for folder in (base / "repo", base) if (folder / "HEAD").exists() or (folder / ".git").exists()), None
    )


def texts(mirror: Path, paths: tuple[str, ...]) -> Iterator[str]:
    """Yield the Python files among these files and folders; of a key in several the first one's default counts."""
    for listed in paths:
        for path in git(mirror, "ls-tree", "-r", "--name-only", "HEAD", "--", listed).splitlines():
            if path.endswith(".py"):
                yield git(mirror, "show", f"HEAD:{path}")


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, or of the `default` of a field; Ellipsis where it is none."""
    if isinstance(node, ast.Call):
        named = {item.arg: item.value for item in node.keywords}
        return literal(named["default"]) if "default" in named else ...
    if node is None:
        return ...
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ...
    return value if isinstance(value, str | int | float | bool | list | None) else ...


def keys_of(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the fields of classes and the flags of argument parsers, each with its default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, literal(line.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            named = {item.arg: item.value for item in node.keywords}
            action = literal(named.get("action"))
            default = literal(named["default"]) if "default" in named else False if action == "store_true" else ...
            for flag in flags:
                if flag.startswith("--"):
                    yield flag[2:].replace("-", "_"), default
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:  # the names of DeepSpeed's keys are constants
                if isinstance(target, ast.Name) and target.id.isupper() and isinstance(node.value.value, str):
                    yield node.value.value, ...


def read_trainer(mirrors: Path, name: str, paths: tuple[str, ...]) -> dict[str, Any] | None:
    """Return a trainer's keys and commit; None where there is no clone of it."""
    mirror = mirror_of(mirrors, name)
    if "/" not in name:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{name} is not installed")
        read = [Path(spec.origin).with_name(path).read_text("utf-8") for path in paths]
        source = f"{name} {importlib.metadata.version(name)}"
    elif mirror is None:
        return None
    else:
        read = list(texts(mirror, paths))
        source = f"{name}@{git(mirror, 'rev-parse', 'HEAD').strip()}"
    defaults: dict[str, Any] = {}
    for text in read:
        for key, default in keys_of(ast.parse(text)):
            if key.isidentifier() or "." in key:
                if default is not ... or key not in defaults:
                    defaults.setdefault(key, default)
                if defaults[key] is ... and default is not ...:
                    defaults[key] = default
    keys = sorted(defaults)
    return {
        "source": source,
        "keys": keys,
        "defaults": {key: defaults[key] for key in keys if defaults[key] is not ... and defaults[key] is not None},
    }


def main() -> None:
    """Write the table; trainers without a clone keep what is written of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirrors", type=Path)
    mirrors = parser.parse_args().mirrors
    before = json.loads(TARGET.read_text("utf-8")) if TARGET.exists() else {}
    table = {}
    for trainer, (name, paths) in SOURCES.items():
        row = read_trainer(mirrors, name, paths) or before.get(trainer)
        if row is None:
            raise SystemExit(f"{mirrors} has no clone of {name}")
        table[trainer] = row
    lines = [f" {json.dumps(trainer)}: {{\n  {_row(row)}\n }}" for trainer, row in table.items()]
    replace_text(TARGET, "{\n" + ",\n".join(lines) + "\n}\n")


def _row(row: dict[str, Any]) -> str:
    return ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())


if __name__ == "__main__":
    main()
