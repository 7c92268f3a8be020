"""Changes of a person's own files: values replaced where they stand, keys added beside their like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware_db.records import dataclass
from planner.read.documents import as_text
from planner.read.form import Reading, Setting, Source
from planner.types.plan import Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A trainer's keys for what a plan decides; empty where it has none."""

    micro: tuple[str, ...] = ()
    """Spellings of the micro-batch, the usual one first."""
    accumulation: str = ""
    recompute: str = ""
    recompute_values: tuple[Any, Any] = (False, True)
    """For none and for full."""
    global_batch: str = ""
    deepspeed: str = ""
    """The key that names a DeepSpeed config."""
    deepspeed_files: Mapping[tuple[str, str], str] | None = None
    """Configs that the trainer ships, by strategy and offload."""


_HF = Names(
    micro=("per_device_train_batch_size",),
    accumulation="gradient_accumulation_steps",
    recompute="gradient_checkpointing",
)
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
NAMES: Mapping[str, Names] = {
    "huggingface": _HF,
    "trl": _HF,
    "llama-factory": Names(
        micro=_HF.micro,
        accumulation=_HF.accumulation,
        recompute="disable_gradient_checkpointing",
        recompute_values=(True, False),
        deepspeed="deepspeed",
        deepspeed_files=_FACTORY_FILES,
    ),
    "ms-swift": Names(
        micro=_HF.micro,
        accumulation=_HF.accumulation,
        recompute=_HF.recompute,
        deepspeed="deepspeed",
        deepspeed_files=_SWIFT_FILES,
    ),
    "axolotl": Names(
        micro=("micro_batch_size",),
        accumulation="gradient_accumulation_steps",
        recompute="gradient_checkpointing",
        deepspeed="deepspeed",
        deepspeed_files=_AXOLOTL_FILES,
    ),
    "deepspeed": Names(
        micro=("train_micro_batch_size_per_gpu",),
        accumulation="gradient_accumulation_steps",
        global_batch="train_batch_size",
    ),
    "torchtune": Names(
        micro=("batch_size",), accumulation="gradient_accumulation_steps", recompute="enable_activation_checkpointing"
    ),
    "megatron": Names(micro=("micro_batch_size",), global_batch="global_batch_size"),
    "megatron-swift": Names(micro=("micro_batch_size",), global_batch="global_batch_size"),
    "openrlhf": Names(micro=("train.micro_batch_size", "micro_train_batch_size")),
}


def changes_to(reading: Reading, now: Configuration, then: Configuration) -> dict[str, Any] | None:
    """Return the keys to set so that a config runs another configuration; None where the format has no keys for it.

    The global batch stays, so that micro-batch and accumulation change together.
    """
    names = NAMES.get(reading.format)
    if names is None or any(
        getattr(now, field) != getattr(then, field)
        for field in ("tp", "pp", "cp", "ep", "virtual_stages", "global_batch_size", "optimizer", "attention")
    ):
        return None
    if now.precision != then.precision and (now.strategy == then.strategy or now.precision != "bf16-pure"):
        return None  # what bf16 means follows from the strategy
    changes: dict[str, Any] = {}
    if now.micro_batch_size != then.micro_batch_size:
        changes[_spelling(reading, names.micro)] = then.micro_batch_size
        if names.accumulation:
            changes[names.accumulation] = then.gradient_accumulation_steps
    if now.activation_checkpointing != then.activation_checkpointing:
        if not names.recompute or then.activation_checkpointing == "selective":
            return None
        changes[names.recompute] = names.recompute_values[then.activation_checkpointing == "full"]
    if (now.strategy, now.offload) != (then.strategy, then.offload):
        spread = _spread(reading, names, now, then)
        if spread is None:
            return None
        changes |= spread
    return changes or None


def _spelling(reading: Reading, spellings: tuple[str, ...]) -> str:
    return next((key for key in spellings if key in reading.settings), spellings[0])


def _spread(reading: Reading, names: Names, now: Configuration, then: Configuration) -> dict[str, Any] | None:
    """Return the keys that say another strategy or offload."""
    if reading.format == "deepspeed":
        return _deepspeed_keys(then)
    own_fsdp = any(key.startswith("fsdp") for key in reading.settings)
    if (
        names.deepspeed_files is None
        or own_fsdp
        or (reading.answers.get("backend") == "torch" and "strategy" in reading.answers)
    ):
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
        edit = _replaced(setting, value) if setting is not None and setting.start >= 0 else None
        if edit is None:
            anchor = _anchor(reading, key)
            if anchor is None:
                return None
            setting, edit = anchor, _added(anchor, key, value)
        assert setting is not None
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


def _anchor(reading: Reading, key: str) -> Setting | None:
    """Return the setting that a new key is written behind: of the same mapping, and written as it stands."""
    prefix = key.rpartition(".")[0]
    written = [item for item in reading.settings.values() if item.start >= 0 and item.source.is_file]
    like = [item for item in written if item.key.rpartition(".")[0] == prefix]
    related = [item for item in like if item.key in _RELATED.get(key, ())]
    return next(iter(related), next(iter(reversed(like)), None))


_BATCH = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps", "batch_size")
_RELATED: Mapping[str, tuple[str, ...]] = {
    "gradient_checkpointing": ("bf16", *_BATCH),
    "disable_gradient_checkpointing": ("bf16", *_BATCH),
    "gradient_accumulation_steps": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "deepspeed": ("finetuning_type", *_BATCH),
}


def _added(anchor: Setting, key: str, value: Any) -> tuple[int, int, str]:
    """Return the text of a new key behind another one, indented as that is."""
    source, name = anchor.source, key.rpartition(".")[2]
    syntax = _syntax(source)
    line_start = source.text.rfind("\n", 0, anchor.start) + 1
    indent = re.match(r"[ \t]*", source.text[line_start:]) or re.match("", "")
    assert indent is not None
    if syntax == "json":
        return anchor.end, anchor.end, f',\n{indent[0]}"{name}": {as_text(value, syntax)}'
    if syntax == "shell":
        text = as_text(value, syntax)
        flags = re.findall(r"--([\w.-]+)", source.text[line_start : anchor.start])
        name = name.replace("_", "-") if flags and "-" in flags[-1] and "_" not in flags[-1] else name
        if source.text[anchor.end : anchor.end + 1] in "'\"":
            return anchor.end + 1, anchor.end + 1, f" --{name} {text}"
        breaks = "\\\n" in source.text[anchor.end :].split("\n\n")[0][:200] or bool(indent[0])
        return anchor.end, anchor.end, f" \\\n{indent[0]}--{name} {text}" if breaks else f" --{name} {text}"
    line_end = source.text.find("\n", anchor.end)
    line_end = len(source.text) if line_end < 0 else line_end
    separator = " = " if syntax == "toml" else ": "
    return line_end, line_end, f"\n{indent[0]}{name}{separator}{as_text(value, syntax)}"


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
