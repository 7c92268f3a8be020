"""Settings: the dtypes, bucket sizes and scales that a plan and the script's config ask of our ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.plan import Configuration
from planner.zero_buckets import native_buckets
from strategies.base import TrainingParts
from strategies.errors import CannotRun
from strategies.zero.loss_scale import ScaleSettings

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTE = {**_DTYPES, "bf16-pure": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """What the stages need to know.

    `compute` is the dtype of weights, None where they keep their own; `master` that of the optimizer's copy, None for
    no copy; `accumulate` that in which gradients wait for the step; `reduce` that in which they travel (None: as they
    are made). `bucket` and `persistence_threshold` are elements.
    """

    compute: torch.dtype | None
    master: torch.dtype | None
    accumulate: torch.dtype | None
    reduce: torch.dtype | None
    bucket: int
    persistence_threshold: int
    offload: str
    scale: ScaleSettings | None

    def weights(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` computes; fp64 and integers keep theirs."""
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        return self.compute if self.compute is not None and dtype in narrow else dtype


def read_settings(parts: TrainingParts, device: torch.device) -> ZeroSettings:
    """The settings of a plan, with what DeepSpeed's keys in the script's config say of them.

    Raises:
        CannotRun: a value is not of its kind.
    """
    configuration, script = parts.plan.configuration, parts.script_config
    hidden = parts.plan.model.get("hidden_size")
    buckets = native_buckets(
        configuration.zero_stage,
        hidden_size=hidden if isinstance(hidden, int) else 0,
        on_cpu=device.type == "cpu",
    )
    zero, data_types = _section(script, "zero_optimization"), _section(script, "data_types")
    return ZeroSettings(
        compute=None if configuration.precision == "fp32" else _COMPUTE[configuration.precision],
        master=torch.float32 if configuration.precision in ("bf16", "fp16") else None,
        accumulate=_dtype(data_types, "grad_accum_dtype", _accumulate(configuration)),
        reduce=_dtype(script, "communication_data_type", None),
        bucket=_count(zero, "reduce_bucket_size", buckets.reduce),
        persistence_threshold=_count(zero, "stage3_param_persistence_threshold", buckets.persistence_threshold),
        offload=configuration.offload,
        scale=_scale(_section(script, "fp16")) if configuration.precision == "fp16" else None,
    )


def _accumulate(configuration: Configuration) -> torch.dtype | None:
    """Sums over micro-batches lose bits in 16-bit types, a sum over ranks alone is rounded once."""
    several = configuration.gradient_accumulation_steps > 1
    return torch.float32 if several and configuration.precision in ("bf16", "fp16") else None


def _scale(section: Mapping[str, Any]) -> ScaleSettings:
    fixed = section.get("loss_scale", 0)
    return ScaleSettings(
        initial=float(fixed or 2.0 ** _count(section, "initial_scale_power", 16)),
        window=_count(section, "loss_scale_window", 1000),
        hysteresis=_count(section, "hysteresis", 2),
        floor=float(section.get("min_loss_scale", 1.0)),
        is_dynamic=not fixed,
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _count(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    if value == "auto":
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON writes 5e8
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CannotRun(f"config: {key} is {value!r}; it must be a whole number")
    return value


def _dtype(section: Mapping[str, Any], key: str, default: torch.dtype | None) -> torch.dtype | None:
    value = section.get(key)
    if value is None:
        return default
    if value not in _DTYPES:
        raise CannotRun(f"config: {key} is {value!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[value]
