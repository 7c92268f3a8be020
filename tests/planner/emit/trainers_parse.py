"""Reads [[tool, {filename: text}, ranks], ...] from stdin and prints what each tool's own parser makes of the files.

The tools are checkouts under the directory that DSPLAN_TRAINERS names; its folder `site` may hold packages that they
need (pip install --target: dacite, tyro, spmd_types, grain, portpicker, torchdata). What they import and a CPU does not
have (Triton and kernels) is replaced; nothing that reads a config is.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import shlex
import sys
import tempfile
import typing
from pathlib import Path
from unittest.mock import MagicMock

import typing_extensions

ROOT = Path(os.environ["DSPLAN_TRAINERS"])
sys.path.append(str(ROOT / "site"))


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that need a GPU; a config is read without them."""

    NAMES = ("triton", "flash_attn", "flash_attn_2_cuda", "ring_flash_attn", "grouped_gemm")

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.NAMES else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "3.4.0"
        return module

    def exec_module(self, module):
        pass


def prepare(checkout):
    if not hasattr(typing, "override"):  # Megatron-LM is for Python 3.12
        typing.override = typing_extensions.override
    # These look for Triton when they are imported, and must find what is really here.
    for name in ("torch._dynamo", "torch._inductor.runtime.triton_heuristics", "torch.utils.flop_counter"):
        importlib.import_module(name)
    sys.meta_path.append(Absent())
    sys.path.insert(0, str(checkout))
    os.environ.setdefault("WORLD_SIZE", "1")


def megatron(files, world):
    """Megatron-LM's parser, then its `validate_args` for that many ranks."""
    if str(ROOT / "Megatron-LM") not in sys.path:
        prepare(ROOT / "Megatron-LM")
    import argparse

    from megatron.training.arguments import add_megatron_arguments, validate_args

    text = files["megatron.sh"]
    words = shlex.split(text[text.index("--use-mcore-models") :].replace("\\\n", " "))
    words = [word for word in words if word != "$@"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    args = parser.parse_args([*words, "--train-iters", "10", "--mock-data", "--tokenizer-type", "NullTokenizer"])
    args.rank, args.world_size, args.local_rank = 0, world, 0
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if "CUDA_DEVICE_MAX_CONNECTIONS=1" in text:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    import torch

    torch.cuda.get_device_properties = lambda *_: MagicMock(major=9, minor=0)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        validate_args(args)
    finally:
        sys.stdout = out
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    names += ("expert_model_parallel_size", "data_parallel_size", "micro_batch_size", "global_batch_size", "num_layers")
    return {name: getattr(args, name) for name in names}


def nanotron(files, world):
    """nanotron's `get_config_from_file`."""
    if str(ROOT / "nanotron" / "src") not in sys.path:
        prepare(ROOT / "nanotron" / "src")
    from nanotron.config import get_config_from_file

    path = Path(tempfile.mkdtemp()) / "nanotron.yaml"
    path.write_text(files["nanotron.yaml"])
    config = get_config_from_file(str(path))
    sizes = config.parallelism
    assert sizes.dp * sizes.tp * sizes.pp * sizes.context_parallel_size == world
    return {
        "model": type(config.model.model_config).__name__,
        "global_batch_size": config.global_batch_size,
        "engine": type(sizes.pp_engine).__name__,
        "mode": sizes.tp_mode.name,
        "degrees": [sizes.dp, sizes.tp, sizes.pp, sizes.context_parallel_size],
        "zero_stage": config.optimizer.zero_stage,
    }


def torchtitan_toml(files, world):
    """The ConfigManager of torchtitan 0.2.2, and its ParallelDims."""
    if str(ROOT / "torchtitan-0.2.2") not in sys.path:
        prepare(ROOT / "torchtitan-0.2.2")
    from torchtitan.config import ConfigManager

    path = Path(tempfile.mkdtemp()) / "torchtitan.toml"
    path.write_text(files["torchtitan.toml"])
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
    names += ("tensor_parallel_degree", "pipeline_parallel_degree")
    degrees = [getattr(config.parallelism, name) for name in names]
    product = 1
    for degree in degrees:
        product *= degree
    assert product == world
    registry = (ROOT / "torchtitan-0.2.2" / "torchtitan" / "models" / config.model.name / "__init__.py").read_text()
    assert f'"{config.model.flavor}": ' in registry, config.model.flavor
    return {"degrees": degrees, "schedule": config.parallelism.pipeline_parallel_schedule, "model": config.model.flavor}


def torchtitan_python(files, world):
    """The Python file run under torchtitan's own dataclasses."""
    if str(ROOT / "torchtitan") not in sys.path:
        prepare(ROOT / "torchtitan")
    directory = tempfile.mkdtemp()
    (Path(directory) / "torchtitan_plan.py").write_text(files["torchtitan_plan.py"])
    sys.path.insert(0, directory)
    sys.modules.pop("torchtitan_plan", None)
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(["--module", "torchtitan_plan", "--config", "plan"])
    sys.path.remove(directory)
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
    names += ("tensor_parallel_degree", "pipeline_parallel_degree")
    import torch

    with torch.device("meta"):
        weights = sum(weight.numel() for weight in config.model_spec.model.build().parameters())
    return {"degrees": [getattr(config.parallelism, name) for name in names], "weights": weights}


def fields_of(*paths):
    """Fields of every class in these files, and parameters of its constructor, with those of its bases there."""
    classes = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                named = {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
                for line in node.body:
                    if isinstance(line, ast.FunctionDef) and line.name == "__init__":
                        named |= {item.arg for item in (*line.args.args, *line.args.kwonlyargs)}
                bases = [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]
                own, others = classes.setdefault(node.name, (set(), []))
                own |= named
                others += bases
    return classes


def accepted(classes, name):
    seen, queue, names = set(), [name], set()
    while queue:
        current = queue.pop()
        for base in (current, current.removeprefix("MCore"), current.removeprefix("MTrain")):
            if base in classes and base not in seen:
                seen.add(base)
                names |= classes[base][0]
                queue += classes[base][1]
    return names


def python(files, world, *roots):
    """The keyword arguments of every call of a class that the checkouts define, against its fields."""
    text = next(text for name, text in files.items() if name.endswith("_plan.py"))
    classes = fields_of(*(path for root in roots for path in (ROOT / root).rglob("*.py")))
    unknown, checked = [], 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in classes:
                checked += 1
                unknown += [f"{name}.{item.arg}" for item in node.keywords if item.arg not in accepted(classes, name)]
    return {"checked": checked, "unknown": unknown}


TOOLS = {
    "megatron": megatron,
    "nanotron": nanotron,
    "torchtitan-0.2.2": torchtitan_toml,
    "torchtitan": torchtitan_python,
    "megatron-bridge": lambda files, world: python(
        files, world, "Megatron-Bridge/src/megatron/bridge/training", "Megatron-Bridge/src/megatron/bridge/models",
        "Megatron-LM/megatron/core", "Megatron-LM/megatron/training/config",
    ),
    "nemo": lambda files, world: python(
        files, world, "NeMo/nemo/lightning", "NeMo/nemo/collections/llm/gpt", "Megatron-LM/megatron/core"
    ),
}  # fmt: skip

print(json.dumps([TOOLS[tool](files, world) for tool, files, world in json.load(sys.stdin)]))
