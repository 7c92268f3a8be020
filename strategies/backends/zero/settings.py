"""Settings: the dtypes, bucket sizes and scales that a plan and the script's config ask of our ZeRO."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from planner.cost.precision import accumulates_in_fp32
from planner.cost.zero_bucket_sizes import native_buckets
from planner.types.plan import Configuration
from planner.vocabulary import Offload
from strategies.errors import CannotRun
from strategies.modules.compression import GradientTravel, gradient_travel
from strategies.modules.precision import DTYPES, ScaleSettings, read_scale_settings
from strategies.protocols import TrainingParts
from strategies.variables import NVME_PATH

_COMPUTE = {**DTYPES, "bf16-pure": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """Offload: `ratio` of what the plan's word `kind` names.

    With `nvme` it goes to a file below `nvme_path`, of which `buffers` buckets may be in memory at once. `pins`: host
    memory that a GPU copies from and to is page-locked.
    """

    kind: Offload = "none"
    ratio: float = 1.0
    nvme_path: str = ""
    buffers: int = 4
    pins: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """Settings of the stages.

    `compute` is the dtype of weights, or None if they keep their own; `master` that of the optimizer's copy, None for
    no copy; `accumulate` that in which gradients wait for the step; `travel` says how they are summed over ranks.
    `bucket` and `persistence_threshold` are elements.
    """

    compute: torch.dtype | None
    master: torch.dtype | None
    accumulate: torch.dtype | None
    travel: GradientTravel
    bucket: int
    persistence_threshold: int
    offload: OffloadSettings
    scale: ScaleSettings | None

    def weights(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of `dtype` computes; fp64 and integers keep theirs."""
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        return self.compute if self.compute is not None and dtype in narrow else dtype


def read_settings(parts: TrainingParts, device: torch.device) -> ZeroSettings:
    """Return the settings of a plan, with what the script's config says of them.

    Raises:
        CannotRun: keys of the config contradict each other, or NVMe has no path.
    """
    configuration, script = parts.plan.configuration, parts.script
    hidden = parts.plan.model.get("hidden_size")
    buckets = native_buckets(
        configuration.zero_stage,
        hidden_size=hidden if isinstance(hidden, int) else 0,
        on_cpu=device.type == "cpu",
    )
    compute = None if configuration.precision == "fp32" else _COMPUTE[configuration.precision]
    travel, threshold = gradient_travel(parts), script.zero.param_persistence_threshold
    sent = travel.dtype or compute or torch.float32
    bucket = script.zero.reduce_bucket_size or script.communication.bucket_elements(sent.itemsize)
    accumulate = script.accumulate_dtype
    return ZeroSettings(
        compute=compute,
        master=torch.float32 if configuration.precision in ("bf16", "fp16") else None,
        accumulate=default_accumulation(configuration) if accumulate is None else DTYPES[accumulate],
        travel=travel,
        bucket=buckets.reduce if bucket is None else bucket,
        persistence_threshold=buckets.persistence_threshold if threshold is None else threshold,
        offload=_offload(parts),
        scale=read_scale_settings(script.fp16) if configuration.precision == "fp16" else None,
    )


def _offload(parts: TrainingParts) -> OffloadSettings:
    configuration, script = parts.plan.configuration, parts.script.zero
    path = script.nvme_path or os.environ.get(NVME_PATH, "")
    if configuration.offload == "nvme" and not path:
        raise CannotRun(
            "offload 'nvme' needs a directory on a local disk; set zero_optimization.offload_optimizer.nvme_path in the"
            f" config, or {NVME_PATH}"
        )
    settings = OffloadSettings(
        kind=configuration.offload, ratio=min(script.offload_ratio, configuration.offload_ratio), nvme_path=path
    )
    return replace(
        settings,
        buffers=settings.buffers if script.buffer_count is None else script.buffer_count,
        pins=settings.pins if script.pin_memory is None else script.pin_memory,
    )


def default_accumulation(configuration: Configuration) -> torch.dtype | None:
    """Return the dtype in which gradients add up where the config names none; None for that of the weights."""
    return torch.float32 if accumulates_in_fp32(configuration) else None
