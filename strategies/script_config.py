"""The DeepSpeed-style config of a script: a dictionary or JSON file of which every strategy reads the same few keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.plan import Configuration
from planner.vocabulary import Precision
from strategies.errors import BrokenFile, CannotRun

# What the torch strategies honour; the DeepSpeed strategies hand the whole config to DeepSpeed.
_READ_EVERYWHERE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_optimization",
}
_READ_BY_NATIVE = {"communication_data_type", "data_types"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptConfig:
    """What the config says of the plan; None where it says nothing (or `auto`). `values` is the config as it was."""

    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 0.0
    precision: Precision | None = None
    zero_stage: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def global_batch_size(self, data_parallel: int) -> int | None:
        """Samples per optimizer step, from `train_batch_size` or the product of the other two.

        Raises:
            CannotRun: the three numbers contradict each other.
        """
        micro, accumulation = self.micro_batch_size, self.gradient_accumulation_steps
        product = None if micro is None else micro * (accumulation or 1) * data_parallel
        if self.train_batch_size is None or micro is None or accumulation is None:
            return self.train_batch_size or product
        if product != self.train_batch_size:
            raise CannotRun(
                f"config: train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {accumulation} x"
                f" {data_parallel} ranks = {product} is not train_batch_size {self.train_batch_size}; leave one out"
            )
        return product

    def refuse_deepspeed_keys(self, configuration: Configuration) -> None:
        """Stop at keys that only DeepSpeed reads, when another engine runs.

        Raises:
            CannotRun: naming the keys.
        """
        is_native = configuration.backend == "native"
        unread = sorted(set(self.values) - _READ_EVERYWHERE - (_READ_BY_NATIVE if is_native else set()))
        if unread:
            name = "backend 'native'" if is_native else f"strategy {configuration.strategy!r}"
            raise CannotRun(
                f"config: {name} does not read {', '.join(unread)}; pass optimizer= and lr_scheduler= to"
                " initialize, or use zero1, zero2 or zero3 with backend 'deepspeed'"
            )


def read_config(config: Mapping[str, Any] | str | Path | None) -> ScriptConfig:
    """The config of a script from a dictionary, a JSON file, or nothing.

    Raises:
        BrokenFile: the file is not JSON with an object at the top.
        CannotRun: a value has the wrong type.
    """
    values = {} if config is None else dict(config) if isinstance(config, Mapping) else read_json(Path(config))
    stage = _section(values, "zero_optimization").get("stage")
    return ScriptConfig(
        train_batch_size=_count(values, "train_batch_size"),
        micro_batch_size=_count(values, "train_micro_batch_size_per_gpu"),
        gradient_accumulation_steps=_count(values, "gradient_accumulation_steps"),
        gradient_clipping=_clipping(values),
        precision=_precision(values),
        zero_stage=_stage(stage),
        values=values,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a DeepSpeed JSON file.

    Raises:
        BrokenFile: the file cannot be read or is not JSON with an object at the top.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as problem:
        raise BrokenFile(path, f"cannot be read ({problem.strerror})", "give a JSON file or a dictionary") from None
    except ValueError as problem:
        raise BrokenFile(path, f"is not JSON ({problem})", "correct it at that place") from None
    if not isinstance(values, dict):
        raise BrokenFile(path, "does not hold a JSON object", 'write it as {"train_batch_size": ...}')
    return values


def _count(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CannotRun(f"config: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _clipping(values: Mapping[str, Any]) -> float:
    value = values.get("gradient_clipping", 0.0)
    if value == "auto":
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise CannotRun(f"config: gradient_clipping is {value!r}; it must be a number, 0 for none")
    return float(value)


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = values.get(key, {})
    if not isinstance(section, Mapping):
        raise CannotRun(f"config: {key} is {section!r}; it must be an object")
    return section


def _precision(values: Mapping[str, Any]) -> Precision | None:
    enabled = {name: _section(values, name).get("enabled") for name in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise CannotRun("config: bf16 and fp16 are both enabled; enable one")
    if enabled["bf16"] is True:
        return "bf16"
    if enabled["fp16"] is True:
        return "fp16"
    # A config that switches both off asks for fp32; one that mentions neither leaves the choice to the plan.
    return "fp32" if False in enabled.values() else None


def _stage(value: object) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value not in range(4):
        raise CannotRun(f"config: zero_optimization.stage is {value!r}; it must be 0, 1, 2 or 3")
    return value
