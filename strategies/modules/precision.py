"""The precisions of a plan under the torch strategies.

`single` and `ddp` compute `bf16` and `fp16` under autocast over fp32 weights, as HF Trainer does. FSDP keeps fp32
shards, computes in 16 bits and reduces gradients in fp32. `bf16-pure` keeps everything, optimizer states too, in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from strategies.config.values import Fp16Section
from strategies.parallel.empty import cast
from strategies.torch_compat.tensors import foreach_norm, tree_map

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The words of configs and calls for dtypes."""
_COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DTYPE = {**_COMPUTE_DTYPE, "bf16-pure": torch.bfloat16}
"""The dtypes that ZeRO's weights compute in; fp32 is not in it."""


def cast_model(model: nn.Module, precision: str, keep: Collection[nn.Parameter] = ()) -> nn.Module:
    """Cast the weights of a model to bf16 for `bf16-pure`, all but those to `keep`; else they stay as they are."""
    if precision != "bf16-pure":
        return model
    kept = {id(weight) for weight in keep}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if id(tensor) not in kept and tensor.is_floating_point():
            tensor.data = cast(tensor.data, torch.bfloat16)
    return model


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast for `bf16` and `fp16`, and nothing for the others."""
    dtype = _COMPUTE_DTYPE.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def sharding_policy(precision: str, reduce: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: 16-bit compute over fp32 shards, gradients reduced in `reduce`, else in fp32."""
    dtype = _COMPUTE_DTYPE.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=reduce)
    return MixedPrecisionPolicy(dtype, reduce or torch.float32)


def narrow_inputs(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Cast the fp32 tensors of a forward pass's inputs to the dtype that weights compute in; None leaves them."""

    def narrow(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_wide else value

    return inputs if dtype is None else tree_map(narrow, inputs)


_RUN = 16_384
"""Elements that one sum on a CPU takes: torch adds them up in fp32 one after the other, and falls 1 % short at 1e8."""


def split_runs(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of tensors whose norms are right: those of a CPU in runs of some elements."""
    views: list[torch.Tensor] = []
    for value in values:
        is_long = value.device.type == "cpu" and value.numel() > _RUN and value.is_contiguous()
        views += torch.split(value.view(-1), _RUN) if is_long else (value,)
    return views


def sum_squares(values: Iterable[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return the sum of the squares of all elements, an fp64 scalar on the tensors' device, or else on `device`."""
    parts = split_runs(value for value in values if value.numel())
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    is_double = any(part.dtype == torch.float64 for part in parts)
    norms = foreach_norm(parts, 2, dtype=torch.float64 if is_double else torch.float32)
    return torch.stack(norms).double().square().sum()


_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSettings:
    """The loss scale's start and course; DeepSpeed's defaults."""

    initial: float = 2.0**16
    window: int = 1000
    """Steps without overflow until it grows."""
    hysteresis: int = 2
    """Overflows until it shrinks."""
    floor: float = 1.0
    is_dynamic: bool = True


def read_scale_settings(section: Fp16Section) -> ScaleSettings:
    """Read a config's `fp16` section."""
    fixed, power = section.loss_scale, section.initial_scale_power
    settings: dict[str, Any] = {
        "initial": fixed or (None if power is None else 2.0**power),
        "window": section.loss_scale_window,
        "hysteresis": section.hysteresis,
        "floor": section.min_loss_scale,
    }
    return ScaleSettings(**{name: value for name, value in settings.items() if value is not None}, is_dynamic=not fixed)


class LossScale:
    """The factor that keeps small fp16 gradients from being rounded to zero; without settings it is 1 and stays it."""

    def __init__(self, settings: ScaleSettings | None) -> None:
        self._settings = settings
        self.value = 1.0 if settings is None else settings.initial
        self._good_steps = 0
        self._overflows_left = 0 if settings is None else settings.hysteresis

    def count_step(self) -> None:
        """Count a step that was taken."""
        if self._settings is None or not self._settings.is_dynamic:
            return
        self._good_steps += 1
        if self._good_steps >= self._settings.window:
            self._good_steps = 0
            self._overflows_left = self._settings.hysteresis
            self.value *= _FACTOR

    def count_overflow(self) -> None:
        """Count a step that was skipped for gradients that are not finite."""
        if self._settings is None or not self._settings.is_dynamic:
            return
        self._good_steps = 0
        self._overflows_left -= 1
        if self._overflows_left <= 0:
            self.value = max(self._settings.floor, self.value / _FACTOR)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON with the names of torch's GradScaler, so that its strategies resume from it."""
        if self._settings is None:
            return {}
        return {
            "scale": self.value,
            "growth_factor": _FACTOR,
            "backoff_factor": 1 / _FACTOR,
            "growth_interval": self._settings.window,
            "_growth_tracker": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the scale of this class or of torch's GradScaler; nothing where fp16 is off on either side."""
        if self._settings is None or "scale" not in state:
            return
        self.value = float(state["scale"])
        self._good_steps = int(state["_growth_tracker"])
        self._overflows_left = int(state.get("overflows_left", self._settings.hysteresis))
