"""Parses emitted files with one trainer's own code: `python emitted_parse.py FORMAT CHECKOUT SITE`.

Reads {plan: {filename: text}} from standard input and prints {plan: complaint} of those that the parser refuses.
Packages that only a GPU or a cluster would import are replaced by names without content.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

Files = Mapping[str, str]
_ABSENT = (
    *(
        "ray",
        "vllm",
        "sglang",
        "flash_attn",
        "triton",
        "bitsandbytes",
        "torchao",
        "modelscope",
        "optimum",
        "liger_kernel",
    ),
    *(
        "wandb",
        "torchdata",
        "tensordict",
        "megatron",
        "nemo_automodel",
        "ring_flash_attn",
        "pylatexenc",
        "zmq",
        "deep_ep",
    ),
    *("math_verify", "codetiming", "mlflow", "swanlab", "torchvision", "xformers", "decord", "qwen_vl_utils", "addict"),
    *(
        "transformer_engine",
        "nvtx",
        "pynvml",
        "debugpy",
        "colored",
        "blobfile",
        "tiktoken",
        "kagglehub",
        "sentencepiece",
    ),
    *(
        "attrdict",
        "dacite",
        "binpacking",
        "gradio",
        "trackio",
        "matplotlib",
        "soundfile",
        "scipy",
        "jieba",
        "rouge",
        "nltk",
        "schedulefree",
        "comet_ml",
    ),
)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are not here, as names without content."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        first = name.partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if first in _ABSENT else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "99.0"
        module.__name__, module.__file__ = spec.name, None
        return module

    def exec_module(self, module: Any) -> None:
        return None


def yaml_of(text: str) -> dict[str, Any]:
    import yaml

    config: dict[str, Any] = yaml.safe_load(text)
    return config


def words_of(script: str, after: str) -> list[str]:
    """Return the words of a script's command behind a word."""
    text = script[script.index("\nexec ") :].replace("\\\n", " ")
    words = [word for word in shlex.split(text) if word != "$@"]
    return words[words.index(after) + 1 :]


# Each returns a parser of one plan's files, which raises where the trainer refuses them.


def axolotl(checkout: Path) -> Callable[[Files], None]:
    """Axolotl's pydantic schema, with that of its Liger plugin, which refuse what contradicts itself."""
    sys.path.insert(0, str(checkout / "src"))
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.schemas.config import AxolotlInputConfig

    class WithLiger(AxolotlInputConfig, LigerArgs):  # type: ignore[misc, valid-type]
        pass

    def check(files: Files) -> None:
        config = yaml_of(files["axolotl.yaml"])
        schema = WithLiger if "plugins" in config else AxolotlInputConfig
        if unknown := set(config) - set(schema.model_fields):
            raise ValueError(f"no keys of axolotl: {', '.join(sorted(unknown))}")
        schema(**config)

    return check


def llama_factory(checkout: Path) -> Callable[[Files], None]:
    """LLaMA-Factory's dataclasses through transformers' parser, and its own checks of them."""
    sys.path.insert(0, str(checkout / "src"))
    from llamafactory.hparams import parser

    def check(files: Files) -> None:
        read = parser.HfArgumentParser(parser._TRAIN_ARGS)
        with _deepspeed_here(files):
            model, _data, training, finetuning, _ = read.parse_dict(yaml_of(files["llama_factory.yaml"]))
        parser._verify_model_args(model, _data, finetuning)
        assert training.per_device_train_batch_size > 0

    return check


def ms_swift(checkout: Path) -> Callable[[Files], None]:
    """The flags of ms-swift's dataclasses, which its YAML becomes; what follows would look the model up."""
    sys.path.insert(0, str(checkout))
    from swift.arguments import RLHFArguments, SftArguments
    from transformers import HfArgumentParser

    for kind in (SftArguments, RLHFArguments):
        kind.__post_init__ = lambda self: None

    def check(files: Files) -> None:
        config = yaml_of(files["ms_swift.yaml"])
        flags: list[str] = []
        for key, value in config.items():
            given = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
            flags += [f"--{key}", *map(str, given)]
        kind = RLHFArguments if " rlhf " in files["ms_swift.sh"] else SftArguments
        *_, rest = HfArgumentParser([kind]).parse_args_into_dataclasses(flags, return_remaining_strings=True)
        if rest:
            raise ValueError(f"flags that are left over: {' '.join(rest)}")

    return check


def trl(checkout: Path) -> Callable[[Files], None]:
    """TRL's own command-line parsers, as installed here."""

    def check(files: Files) -> None:
        script = files["trl.sh"]
        name = "grpo" if "trl.scripts.grpo" in script else shlex.split(script[script.index("exec trl ") :])[2]
        module = importlib.import_module(f"trl.scripts.{name}")
        if name == "grpo":  # a round is of all ranks
            config: Any = importlib.import_module("trl").GRPOConfig
            ranks = yaml_of(files["accelerate.yaml"])["num_processes"]
            config.world_size = property(lambda self: ranks)
        Path("trl.yaml").write_text(files["trl.yaml"])
        with _deepspeed_here(files):
            module.make_parser().parse_args_and_config(["--config", "trl.yaml"])

    return check


def torchtune(checkout: Path) -> Callable[[Files], None]:
    """Torchtune's validation: every component is imported, and takes the arguments that it is given."""
    sys.path.insert(0, str(checkout))
    from omegaconf import OmegaConf
    from torchtune.config import validate

    def check(files: Files) -> None:
        validate(OmegaConf.create(yaml_of(files["torchtune.yaml"])))

    return check


def verl(checkout: Path) -> Callable[[Files], None]:
    """Hydra over verl's configs, whose keys are closed, then verl's own dataclasses and `validate_config` of them."""
    import transformers

    sys.path.insert(0, str(checkout))
    transformers.AutoModelForVision2Seq = MagicMock()  # which verl imports, and transformers 5 calls otherwise
    config = MagicMock(architectures=["LlamaForCausalLM"])  # of the critic's model, from the Hub
    transformers.AutoConfig.from_pretrained = MagicMock(return_value=config)
    transformers.AutoTokenizer.from_pretrained = MagicMock()
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    def check(files: Files) -> None:
        script = files["verl.sh"]
        is_sft = "verl.trainer.sft_trainer" in script
        overrides = words_of(script, "verl.trainer.sft_trainer" if is_sft else "verl.trainer.main_ppo")
        with initialize_config_dir(config_dir=str(checkout / "verl/trainer/config"), version_base=None):
            config = compose("sft_trainer_engine" if is_sft else "ppo_trainer", overrides=overrides)
            OmegaConf.to_container(config, resolve=True)
        with contextlib.redirect_stdout(sys.stderr):
            if is_sft:
                for section in (config.engine, config.optim):
                    omega_conf_to_dataclass(section)
            else:
                critic = need_critic(config)
                validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=critic)

    return check


def openrlhf(checkout: Path) -> Callable[[Files], None]:
    """The parser of each of OpenRLHF's programs, and the checks behind it, up to where it trains."""
    sys.path.insert(0, str(checkout))
    spec = importlib.util.spec_from_file_location("hierarchy", checkout / "openrlhf/utils/config.py")
    assert spec is not None
    assert spec.loader is not None
    hierarchy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hierarchy)
    sys.modules |= {"openrlhf": MagicMock(), "openrlhf.utils": MagicMock(), "openrlhf.utils.config": hierarchy}

    def check(files: Files) -> None:
        script = files["openrlhf.sh"]
        program = next(word for word in shlex.split(script.replace("\\\n", " ")) if word.startswith("openrlhf.cli."))
        tree = ast.parse((checkout / f"{program.replace('.', '/')}.py").read_text())
        main = next(node for node in tree.body if isinstance(node, ast.If))
        body = [node for node in main.body if "train(args)" not in ast.unparse(node)]
        from datetime import datetime

        sys.argv = [program, *words_of(script, program)]
        exec(compile(ast.Module(body, []), program, "exec"), {"argparse": argparse, "datetime": datetime, "os": os})

    return check


def nemo_rl(checkout: Path) -> Callable[[Files], None]:
    """NeMo-RL's own loader of configs, with references resolved, and its pydantic schema of each method.

    Keys are those of the config that it is laid over.
    """
    import typing

    import typing_extensions
    from omegaconf import OmegaConf

    spec = importlib.util.spec_from_file_location("nemo_config", checkout / "nemo_rl/utils/config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import transformers

    transformers.__version__ = "5.11.0"  # newer ones are refused for a patch of a tokenizer
    typing.TypedDict = typing_extensions.TypedDict  # which pydantic asks for below Python 3.12
    sys.path.insert(0, str(checkout))
    spec.loader.exec_module(module)
    module.register_omegaconf_resolvers()
    os.environ["NEMO_RL"] = str(checkout)

    def check(files: Files) -> None:
        Path("nemo_rl.yaml").write_text(files["nemo_rl.yaml"])
        config = module.load_config("nemo_rl.yaml")
        base = module.load_config(OmegaConf.load("nemo_rl.yaml")["defaults"])
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        unknown = set(_leaves(resolved)) - set(_leaves(OmegaConf.to_container(base, resolve=False)))
        if unknown := {key for key in unknown if not key.startswith("policy.optimizer.kwargs.")}:  # torch's own
            raise ValueError(f"no keys of NeMo-RL's own config: {', '.join(sorted(unknown))}")
        method = next(name for name in ("grpo", "dpo", "rm", "sft") if name in resolved)
        importlib.import_module(f"nemo_rl.algorithms.{method}").MasterConfig(**resolved)

    return check


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@contextlib.contextmanager
def _deepspeed_here(files: Files) -> Iterator[None]:
    """Lay a DeepSpeed config where the trainer's names it."""
    path = Path("deepspeed.json")
    if "deepspeed.json" in files:
        path.write_text(files["deepspeed.json"])
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


_PARSERS = {
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "ms-swift": ms_swift,
    "trl": trl,
    "torchtune": torchtune,
    "verl": verl,
    "openrlhf": openrlhf,
    "nemo-rl": nemo_rl,
}


def _have_a_card() -> None:
    """Have transformers' arguments take bf16, which they refuse where there is no card."""
    arguments: Any = importlib.import_module("transformers.training_args")
    arguments.is_torch_bf16_gpu_available = lambda: True


def main() -> None:
    """Parse what standard input has, and print what was refused."""
    form, checkout, site = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    plans: dict[str, dict[str, str]] = json.load(sys.stdin)
    sys.path.append(site)
    if form not in ("trl",):
        sys.meta_path.append(Absent())
    _have_a_card()
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # of LLaMA-Factory, which asks for an older transformers
    complaints = {}
    with contextlib.redirect_stdout(sys.stderr):
        check = _PARSERS[form](checkout)
        for name, files in plans.items():
            try:
                check(files)
            except (Exception, SystemExit) as refusal:
                complaints[name] = f"{type(refusal).__name__}: {' '.join(str(refusal).split())[:300]}"
    print(json.dumps(complaints))


if __name__ == "__main__":
    main()
