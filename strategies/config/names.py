"""The optimizers and schedulers that a config can name, and where each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """An optimizer or scheduler that a config can name."""

    name: str
    """As messages and configs spell it."""
    path: str
    """As module:attribute."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's, where they are not the class's own."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DeepSpeed's class that change nothing here: any value where None is written, else that alone."""
    accepts: str | None = None
    """What has the signature, where `path` is a function that passes its arguments on."""
    more: tuple[str, ...] = ()
    """Further names of arguments."""


def plain(name: str) -> str:
    """Return a name as it is looked up: `AdamW_8bit` and `adamw-8bit` are one."""
    return name.lower().replace("-", "").replace("_", "")


def _in(module: str, names: str) -> dict[str, Named]:
    return _by_name(*(Named(name=name, path=f"{module}:{name}") for name in names.split()))


def _by_name(*named: Named) -> dict[str, Named]:
    return {plain(choice.name): choice for choice in named}


# DeepSpeed's classes decay nothing unless they are told to; torch's AdamW decays by 0.01.
_NO_DECAY = {"weight_decay": 0.0}
_OF_DEEPSPEEDS_ADAM = {"torch_adam": None, "fp32_optimizer_states": True, "bias_correction": True}

OPTIMIZERS: Mapping[str, Named] = {
    **_by_name(
        Named(
            name="Adam",
            path="strategies.optim.registry:adam",
            accepts="torch.optim:AdamW",
            defaults=_NO_DECAY,
            settled=_OF_DEEPSPEEDS_ADAM,
        ),
        Named(
            name="AdamW",
            path="torch.optim:AdamW",
            defaults=_NO_DECAY,
            settled={**_OF_DEEPSPEEDS_ADAM, "adam_w_mode": None},
        ),
        Named(name="Lion", path="strategies.optim.lion:Lion", defaults={"lr": 1e-3}),
        Named(
            name="Muon",
            path="strategies.optim.muon:MuonWithAdamW",
            accepts="torch.optim:Muon",
            more=("muon_lr", "adam_lr", "betas"),
        ),
    ),
    **_in("torch.optim", "SGD Adafactor Adagrad RMSprop Adadelta Adamax ASGD NAdam RAdam Rprop SparseAdam LBFGS"),
    **_in("bitsandbytes.optim", "AdamW8bit Adam8bit Lion8bit SGD8bit RMSprop8bit PagedAdamW8bit PagedAdam8bit"),
}
DEEPSPEEDS_OWN = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "MuAdam", "MuAdamW", "MuSGD")
"""Optimizers that are in DeepSpeed alone."""
MADE_BY_DEEPSPEED_ON_CPU = ("adam", "adamw", "adagrad", "lion")
"""What DeepSpeed has CPU classes for, which the time of an offloaded plan is counted for."""

SCHEDULERS: Mapping[str, Named] = {
    **_in("strategies.optim.schedulers", "WarmupLR WarmupDecayLR WarmupCosineLR LRRangeTest"),
    **_by_name(
        Named(
            name="OneCycle",
            path="strategies.optim.schedulers:OneCycle",
            accepts="strategies.optim.schedulers:OneCycleSettings",
        ),
        Named(name="linear", path="strategies.optim.schedulers:LinearWarmup"),
        Named(name="cosine", path="strategies.optim.schedulers:CosineWarmup"),
        Named(name="constant", path="strategies.optim.schedulers:ConstantWarmup"),
    ),
    **_in(
        "torch.optim.lr_scheduler",
        "StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR"
        " CosineAnnealingWarmRestarts CyclicLR OneCycleLR",
    ),
}
