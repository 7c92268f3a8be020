"""Changes of a person's own files: values replaced where they stand, keys added beside their like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from hardware_db.records import dataclass
from planner.read.documents import as_text
from planner.read.form import Reading, Setting, Source
from planner.types.plan import Configuration

Keys = Mapping[str, Any]
FLAG = ""
"""The value of a flag that stands alone on a command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A trainer's keys for what a plan decides; empty where it has none."""

    micro: tuple[str, ...] = ()
    """Spellings of the micro-batch, the usual one first."""
    accumulation: str = ""
    """Empty where it follows from micro-batch and global batch."""
    recompute: Mapping[str, Keys] = field(default_factory=dict)
    """Keys for each kind of recomputation."""
    offload: Mapping[str, Keys] = field(default_factory=dict)
    """Keys for each offload."""
    strategy: Mapping[str, Keys] = field(default_factory=dict)
    """Keys for each strategy between which single keys choose."""
    deepspeed: str = ""
    """The key that names a DeepSpeed config."""
    deepspeed_files: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Configs that the trainer ships, by strategy and offload."""


def _switch(key: str, *, negated: bool = False) -> Mapping[str, Keys]:
    """Return a key that turns recomputation of whole blocks on."""
    return {"none": {key: negated}, "full": {key: not negated}}


_HF_MICRO, _HF_ACCUMULATION = ("per_device_train_batch_size",), "gradient_accumulation_steps"
_HF = Names(micro=_HF_MICRO, accumulation=_HF_ACCUMULATION, recompute=_switch("gradient_checkpointing"))
_SWIFT_FILES = {
    ("zero1", "none"): "zero1", ("zero2", "none"): "zero2", ("zero3", "none"): "zero3",
    ("zero2", "optimizer"): "zero2_offload", ("zero3", "all"): "zero3_offload",
}  # fmt: skip
"""modelscope/ms-swift@3602360a5 `swift/config/`."""
_FACTORY_FILES = {
    ("zero2", "none"): "examples/deepspeed/ds_z2_config.json",
    ("zero3", "none"): "examples/deepspeed/ds_z3_config.json",
    ("zero2", "optimizer"): "examples/deepspeed/ds_z2_offload_config.json",
    ("zero3", "all"): "examples/deepspeed/ds_z3_offload_config.json",
}
"""hiyouga/LLaMA-Factory@ff6d4d12e `examples/deepspeed/`."""
_AXOLOTL_FILES = {
    ("zero1", "none"): "deepspeed_configs/zero1.json",
    ("zero2", "none"): "deepspeed_configs/zero2.json",
    ("zero3", "none"): "deepspeed_configs/zero3_bf16.json",
    ("zero3", "all"): "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
}
"""axolotl-ai-cloud/axolotl@067b021c8 `deepspeed_configs/`."""
_MEGATRON = Names(
    micro=("micro_batch_size",),
    recompute={
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    strategy={"zero1": {"use_distributed_optimizer": True}},
)
NAMES: Mapping[str, Names] = {
    "huggingface": _HF,
    "trl": replace(_HF, strategy={"fsdp": {"fsdp": True}}),
    "llama-factory": Names(
        micro=_HF_MICRO,
        accumulation=_HF_ACCUMULATION,
        recompute=_switch("disable_gradient_checkpointing", negated=True),
        deepspeed="deepspeed",
        deepspeed_files=_FACTORY_FILES,
    ),
    "ms-swift": replace(_HF, deepspeed="deepspeed", deepspeed_files=_SWIFT_FILES),
    "axolotl": replace(_HF, micro=("micro_batch_size",), deepspeed="deepspeed", deepspeed_files=_AXOLOTL_FILES),
    "deepspeed": Names(micro=("train_micro_batch_size_per_gpu",), accumulation=_HF_ACCUMULATION),
    "torchtune": Names(
        micro=("batch_size",),
        accumulation=_HF_ACCUMULATION,
        recompute=_switch("enable_activation_checkpointing"),
        offload={"none": {"fsdp_cpu_offload": False}, "all": {"fsdp_cpu_offload": True}},
    ),
    "torchtitan": Names(
        micro=("training.local_batch_size", "training.batch_size"),
        recompute={kind: {"activation_checkpoint.mode": kind} for kind in ("none", "selective", "full")},
        offload={"none": {"training.enable_cpu_offload": False}, "all": {"training.enable_cpu_offload": True}},
    ),
    "maxtext": Names(
        micro=("per_device_batch_size",),
        accumulation="gradient_accumulation_steps",
        recompute={"none": {"remat_policy": "none"}, "full": {"remat_policy": "full"}},
    ),
    "megatron": _MEGATRON,
    "megatron-swift": _MEGATRON,
    "automodel": Names(
        micro=("step_scheduler.local_batch_size",),
        recompute=_switch("distributed.activation_checkpointing"),
    ),
    "nemo-rl": Names(
        micro=("policy.train_micro_batch_size",),
        recompute=_switch("policy.dtensor_cfg.activation_checkpointing"),
        offload={"none": {"policy.dtensor_cfg.cpu_offload": False}, "all": {"policy.dtensor_cfg.cpu_offload": True}},
    ),
    "verl": Names(
        micro=("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",),
        recompute=_switch("actor_rollout_ref.model.enable_gradient_checkpointing"),
        offload={
            "none": {"actor_rollout_ref.actor.fsdp_config.offload_policy": False},
            "all": {"actor_rollout_ref.actor.fsdp_config.offload_policy": True},
        },
    ),
    "openrlhf": Names(
        micro=("train.micro_batch_size",),
        recompute={"full": {"model.gradient_checkpointing_enable": FLAG}},
        offload={"optimizer": {"ds.adam_offload": FLAG}},
        strategy={f"zero{stage}": {"ds.zero_stage": stage} for stage in (1, 2, 3)},
    ),
    "nanotron": Names(
        micro=("tokens.micro_batch_size",),
        accumulation="tokens.batch_accumulation_per_replica",
        recompute=_switch("parallelism.recompute_layer"),
        strategy={"zero1": {"optimizer.zero_stage": 1}},
    ),
    "llm-foundry": Names(
        micro=("device_train_microbatch_size",),
        recompute=_switch("fsdp_config.activation_checkpointing"),
        strategy={
            "fsdp": {"fsdp_config.sharding_strategy": "FULL_SHARD"},
            "fsdp-grad-op": {"fsdp_config.sharding_strategy": "SHARD_GRAD_OP"},
        },
    ),
}
"""Keys by format, of the sources that its reader names."""


def _names_of(reading: Reading) -> Names | None:
    """Return the keys of a reading's trainer, where it has several backends those of the one that runs."""
    names = NAMES.get(reading.format)
    if names is None:
        return None
    if reading.format == "nemo-rl" and reading.answers.get("code") == "megatron":
        return replace(names, recompute=_switch("policy.megatron_cfg.activation_checkpointing"), offload={})
    if reading.format == "trl" and ("strategy" in reading.answers or not reading.files[0].endswith((".yaml", ".yml"))):
        return replace(names, strategy={})  # what another key or file says of sharding stands against it
    if reading.format == "torchtune" and "single_device" in reading.files[-1]:
        return replace(names, offload={})  # its recipes for one GPU have no FSDP
    if reading.format == "maxtext" and any(reading.answers[field] > 1 for field in ("tp", "pp", "cp")):
        return replace(names, micro=())  # its key counts devices, also those that split one sample
    if reading.format == "automodel" and "model.activation_checkpointing" in reading.settings:
        return replace(names, recompute=_switch("model.activation_checkpointing"))
    if reading.format == "verl" and reading.answers.get("code") == "megatron":
        return replace(names, recompute={}, offload={})
    if reading.format == "verl" and not any(key.startswith("actor_rollout_ref.") for key in reading.settings):
        keys = _switch("model.enable_gradient_checkpointing")
        return replace(names, micro=("data.micro_batch_size_per_gpu",), recompute=keys, offload={})
    return names


def changes_to(reading: Reading, now: Configuration, then: Configuration) -> dict[str, Any] | None:
    """Return the keys to set so that a config runs another configuration; None where the format has no keys for it.

    The global batch stays, so that micro-batch and accumulation change together.
    """
    names = _names_of(reading)
    if (
        names is None
        or reading.files[0].endswith(".py")
        or any(
            getattr(now, name) != getattr(then, name)
            for name in ("tp", "pp", "cp", "ep", "virtual_stages", "global_batch_size", "optimizer", "attention")
        )
    ):
        return None
    if now.precision != then.precision and (now.strategy == then.strategy or now.precision != "bf16-pure"):
        return None  # what bf16 means follows from the strategy
    changes: dict[str, Any] = {}
    if now.micro_batch_size != then.micro_batch_size:
        if not names.micro:
            return None
        changes[_spelling(reading, names.micro)] = then.micro_batch_size
        if names.accumulation:
            changes[names.accumulation] = then.gradient_accumulation_steps
        elif "grad_accum" in reading.answers and "global_batch" not in reading.answers:
            return None
    if now.activation_checkpointing != then.activation_checkpointing:
        keys = names.recompute.get(then.activation_checkpointing)
        if keys is None:
            return None
        changes |= keys
    spread = _spread(reading, names, now, then)
    if spread is None:
        return None
    return changes | spread or None


def _spelling(reading: Reading, spellings: tuple[str, ...]) -> str:
    return next((key for key in spellings if key in reading.settings), spellings[0])


def _spread(reading: Reading, names: Names, now: Configuration, then: Configuration) -> dict[str, Any] | None:
    """Return the keys that say another strategy or offload; None where there are none for them."""
    if (now.strategy, now.offload) == (then.strategy, then.offload):
        return {}
    if reading.format == "deepspeed":
        return _deepspeed_keys(then)
    if not names.deepspeed_files:
        strategy = {} if now.strategy == then.strategy else names.strategy.get(then.strategy)
        offload = {} if now.offload == then.offload else names.offload.get(then.offload)
        return None if strategy is None or offload is None else {**strategy, **offload}
    own_fsdp = any(key.startswith("fsdp") for key in reading.settings)
    if own_fsdp or (reading.answers.get("backend") == "torch" and "strategy" in reading.answers):
        return None
    shipped = names.deepspeed_files.get((then.strategy, then.offload))
    if shipped is None:
        return None
    before = reading.settings.get(names.deepspeed)
    if before is not None and isinstance(before.value, str) and "/" in before.value and reading.format != "ms-swift":
        folder, _, _ = before.value.rpartition("/")
        shipped = f"{folder}/{shipped.rpartition('/')[2]}"
    return {names.deepspeed: shipped}


def _deepspeed_keys(then: Configuration) -> dict[str, Any] | None:
    if not then.zero_stage or then.offload == "nvme":
        return None
    devices = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}[then.offload]
    keys: dict[str, Any] = {"zero_optimization.stage": then.zero_stage}
    keys["zero_optimization.offload_optimizer.device"] = devices[0]
    if then.zero_stage == 3:
        keys["zero_optimization.offload_param.device"] = devices[1]
    return keys


# Texts.


def edited(reading: Reading, changes: Mapping[str, Any]) -> dict[str, tuple[str, str]] | None:
    """Return, by file, the old text and the new one with the changes; None where a key cannot be written."""
    edits: dict[str, list[tuple[int, int, str]]] = {}
    sources: dict[str, Source] = {}
    for key, value in changes.items():
        setting = reading.settings.get(key)
        is_own = (
            setting is not None and setting.start >= 0 and (reading.format != "nemo-rl" or _is_own(reading, setting))
        )
        if setting is not None and is_own and value != FLAG:
            edit = _replaced(setting, value)
        else:
            if (addition := _addition(reading, key, value)) is None:
                return None
            setting, edit = addition
        if not setting.source.is_file:
            return None
        sources[setting.source.path] = setting.source
        edits.setdefault(setting.source.path, []).append(edit)
    return {path: (sources[path].text, _apply(sources[path].text, parts)) for path, parts in edits.items()}


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _syntax(source: Source) -> str:
    suffix = Path(source.path).suffix.lower()
    if suffix in (".json", ".toml"):
        return suffix[1:]
    if suffix in (".yaml", ".yml"):
        return "yaml"
    return "json" if source.text.lstrip().startswith("{") else "shell"


def _replaced(setting: Setting, value: Any) -> tuple[int, int, str]:
    syntax = _syntax(setting.source)
    written = setting.source.text[setting.start : setting.end]
    new = as_text(value, syntax)
    if syntax in ("yaml", "shell") and written[:1] in "'\"" and isinstance(value, str):
        new = f"{written[0]}{new}{written[0]}"
    if syntax == "yaml" and not written.strip():  # the key is there without a value
        new = f" {new}"
    return setting.start, setting.end, new


def _is_own(reading: Reading, setting: Setting) -> bool:
    """Return whether a setting stands in the file itself, not in one that it builds on."""
    return setting.source.path == reading.files[0]


def _addition(reading: Reading, key: str, value: Any) -> tuple[Setting, tuple[int, int, str]] | None:
    """Return the setting that a new key is written behind, and the text for it; None where nothing is like it."""
    written = [item for item in reading.settings.values() if item.start >= 0 and item.source.is_file]
    if reading.format == "nemo-rl":
        written = [item for item in written if _is_own(reading, item)]
    takes_flags = reading.format in ("verl", "openrlhf", "megatron", "megatron-swift")
    if takes_flags and any(_syntax(item.source) == "shell" for item in written):
        return _flag_added(reading, written, key, value)
    prefix, _, name = key.rpartition(".")
    inner = [name]
    while True:
        like = [item for item in written if item.key.rpartition(".")[0] == prefix]
        related = [item for item in like if item.key in _RELATED.get(key, ())]
        anchor = next(iter(related), next(iter(reversed(like)), None))
        if anchor is not None and (len(inner) == 1 or _syntax(anchor.source) == "yaml"):
            return anchor, _added(anchor, inner, value)
        if not prefix or any(item.key.startswith(f"{prefix}.") for item in written):
            return None  # of the mapping only what is nested deeper is there
        prefix, _, name = prefix.rpartition(".")
        inner.insert(0, name)


def _flag_added(
    reading: Reading, written: list[Setting], key: str, value: Any
) -> tuple[Setting, tuple[int, int, str]] | None:
    """Return a new flag, or override, behind one of the same spelling that stands on a line of its own."""
    for anchor in sorted(written, key=lambda item: -_likeness(item.key, key)):
        text = anchor.source.text
        line_start = text.rfind("\n", 0, anchor.start) + 1
        before, after = text[line_start : anchor.start], text[anchor.end :]
        if not re.match(r"[ \t]*(\\\r?)?\n", after):
            continue
        indent = (re.match(r"[ \t]*", before) or [""])[0]
        continued = re.match(r"[ \t]*\\", after) is not None
        if reading.format == "verl":
            if not before.endswith(f"{anchor.key}="):
                continue
            new = f"{key}={as_text(value, 'shell')}"
        else:
            flag = re.search(r"--([\w.-]+)[ =]+$", before)
            if flag is None:
                continue
            name = key if "." in flag[1] else _older(key)
            name = name.replace("_", "-") if "-" in flag[1] and "_" not in flag[1] else name
            alone = value == FLAG or (value is True and reading.format == "megatron")
            new = f"--{name}" if alone else f"--{name} {as_text(value, 'shell')}"
        lead = f" \\\n{indent}" if continued else f"\n{indent}"
        return anchor, (anchor.end, anchor.end, f"{lead}{new}")
    return None


def _likeness(first: str, second: str) -> int:
    """Return how many mappings two keys have in common."""
    pairs = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _older(key: str) -> str:
    """Return OpenRLHF's flag as it was before flags had dots."""
    from planner.read.openrlhf import OLDER

    return OLDER.get(key, key)


_BATCH = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps", "batch_size")
_RELATED: Mapping[str, tuple[str, ...]] = {
    "gradient_checkpointing": ("bf16", *_BATCH),
    "disable_gradient_checkpointing": ("bf16", *_BATCH),
    "gradient_accumulation_steps": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "deepspeed": ("finetuning_type", *_BATCH),
}


def _added(anchor: Setting, names: list[str], value: Any) -> tuple[int, int, str]:
    """Return the text of a new key behind another one, indented as that is; mappings that it is in come first."""
    source, name = anchor.source, names[-1]
    syntax = _syntax(source)
    line_start = source.text.rfind("\n", 0, anchor.start) + 1
    of_key = source.text.split("\n", anchor.line)[anchor.line - 1]  # a value may stand below its key
    indent = re.match(r"[ \t]*(- )?", source.text[line_start:] if syntax == "shell" else of_key)
    margin = indent[0].replace("-", " ") if indent else ""
    if syntax == "json":
        return anchor.end, anchor.end, f',\n{margin}"{name}": {as_text(value, syntax)}'
    if syntax == "shell":
        text = as_text(value, syntax)
        flags = re.findall(r"--([\w.-]+)", source.text[line_start : anchor.start])
        name = name.replace("_", "-") if flags and "-" in flags[-1] and "_" not in flags[-1] else name
        if source.text[anchor.end : anchor.end + 1] in "'\"":
            return anchor.end + 1, anchor.end + 1, f" --{name} {text}"
        breaks = "\\\n" in source.text[anchor.end :].split("\n\n")[0][:200] or bool(margin)
        return anchor.end, anchor.end, f" \\\n{margin}--{name} {text}" if breaks else f" --{name} {text}"
    line_end = source.text.find("\n", anchor.end)
    line_end = len(source.text) if line_end < 0 else line_end
    separator = " = " if syntax == "toml" else ": "
    outer = "".join(f"\n{margin}{'  ' * depth}{mapping}:" for depth, mapping in enumerate(names[:-1]))
    step = "  " * (len(names) - 1)
    return line_end, line_end, f"{outer}\n{margin}{step}{name}{separator}{as_text(value, syntax)}"


def unified(texts: Mapping[str, tuple[str, str]]) -> str:
    """Return the changes as a unified diff, which `patch -p0` takes."""
    pieces = []
    for path, (old, new) in texts.items():
        lines = difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), fromfile=path, tofile=path
        )
        for line in lines:
            pieces.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(pieces)
