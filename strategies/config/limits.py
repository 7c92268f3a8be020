"""A script's config as limits of the planner's search, for the plan that is made for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner import vocabulary as words
from planner.cost.combinations import offloads_of
from planner.search.request import ZeroPlus
from planner.types.cluster import Cluster
from planner.types.plan import Configuration
from strategies.config.fields import Fields
from strategies.config.known import TOP, Keys
from strategies.config.names import plain
from strategies.config.values import ActivationSection, NamedParts, ScriptConfig, ZeroSection
from strategies.errors import CannotRun
from strategies.parallel.blocks import repeated_blocks
from strategies.tracing.step.checkpointing import recomputed_modules

_CLASSES: dict[type, words.Optimizer] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adamw",
    torch.optim.SGD: "sgd",
    torch.optim.Adafactor: "adafactor",
}
_NAMES: dict[str, words.Optimizer] = {
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion": "lion",
    "adamw8bit": "adamw-8bit",
}


def micro_batch(config: ScriptConfig, world_size: int) -> int | None:
    """Return the micro-batch where the config decides it: by name, or through global batch and accumulation.

    Raises:
        CannotRun: the global batch cannot be split so.
    """
    if config.micro_batch_size is not None or config.gradient_accumulation_steps is None:
        return config.micro_batch_size
    if config.train_batch_size is None:
        return None
    parts = config.gradient_accumulation_steps * world_size
    if config.train_batch_size % parts:
        raise CannotRun(
            f"config: train_batch_size {config.train_batch_size} is not a multiple of gradient_accumulation_steps"
            f" {config.gradient_accumulation_steps} x {world_size} ranks; change one of them"
        )
    return config.train_batch_size // parts


def limit_offload(zero: ZeroSection, strategy: words.Strategy | None, zero_backend: words.Backend) -> dict[str, Any]:
    """Return the offload that the config decides, as fields of Request.

    Raises:
        CannotRun: the strategy cannot offload so.
    """
    if zero.offload in (None, "none"):
        return {"offload": zero.offload}
    if strategy is not None:
        backend = words.default_backend(strategy, zero=zero_backend)
        possible = offloads_of(strategy, backend)
        if zero.offload not in possible:
            raise CannotRun(
                f"config: zero_optimization offloads {zero.offload!r}, and {strategy!r} of backend {backend!r} can"
                f" offload {', '.join(possible) or 'nothing'}; change offload_optimizer and offload_param, or the stage"
            )
    return {"offload": zero.offload, "offload_ratio": zero.offload_ratio}


def read_zero_plus(zero: ZeroSection) -> ZeroPlus | None:
    """Return what the config asks of ZeRO++; None for nothing."""
    settings = ZeroPlus(
        hpz_partition_size=zero.hpz_partition_size,
        quantized_weights=zero.quantized_weights,
        quantized_gradients=zero.quantized_gradients,
    )
    return None if settings == ZeroPlus() else settings


def add_disk(cluster: Cluster, zero: ZeroSection) -> Cluster:
    """Add the free space where the config puts NVMe files, which a probe does not look for.

    Raises:
        CannotRun: there is no such directory.
    """
    if zero.offload != "nvme" or zero.nvme_path is None or cluster.nvme_bytes_per_node:
        return cluster
    try:
        # What is missing is not made: a mistyped mount point would fill the disk that it should be mounted on.
        free = shutil.disk_usage(Path(zero.nvme_path)).free
    except OSError as problem:
        raise CannotRun(
            f"config: nvme_path {zero.nvme_path} cannot be used ({problem.strerror}); name a directory that is there"
        ) from None
    return replace(cluster, nvme_bytes_per_node=free)


def limit_activations(section: ActivationSection, model: nn.Module) -> dict[str, Any]:
    """Return what may be checkpointed and where it is kept, as fields of Request.

    Raises:
        CannotRun: the script has chosen modules itself and the config chooses a policy, or there is nothing to keep.
    """
    policy = section.effective_policy
    if recomputed_modules(model):
        if policy not in (None, "none"):
            raise CannotRun(
                f"config: activation_checkpointing asks for {policy!r} and the script chose modules itself by"
                " checkpoint_activations; leave out one of them"
            )
        return {"checkpointings": ("none",)}
    if section.cpu_checkpointing and policy == "none":
        raise CannotRun(
            "config: activation_checkpointing.cpu_checkpointing moves what a policy keeps, and the policy is 'none';"
            " choose 'full' or 'selective'"
        )
    return {"checkpointings": _checkpointings(model, policy), "activations_on_host": section.cpu_checkpointing}


def _checkpointings(model: nn.Module, policy: words.Checkpointing | None) -> tuple[words.Checkpointing, ...] | None:
    """Return what a plan may recompute: the config's policy, else what the model has blocks for; None: everything."""
    if policy is not None:
        return (policy,)
    if repeated_blocks(model):
        return None
    return ("none", "full") if getattr(model, "supports_gradient_checkpointing", False) else ("none",)


def name_optimizer(own: object, named: NamedParts | None) -> words.Optimizer:
    """Return the plan's name of the script's optimizer (instance or class), or of the config's.

    AdamW, which needs most memory, where the plan has no name for it.
    """
    if own is None and named is not None:
        name = _NAMES.get(plain(named.name), "adamw")
        return _adamw_variant(named.params) if name == "adamw" else name
    name = _CLASSES.get(own if isinstance(own, type) else type(own), "adamw")
    return _adamw_variant(getattr(own, "defaults", {})) if name == "adamw" else name


def _adamw_variant(options: Mapping[str, Any]) -> words.Optimizer:
    """Return which of torch's three implementations of AdamW its options choose."""
    if options.get("fused"):
        return "adamw-fused"
    return "adamw-forloop" if options.get("foreach") is False else "adamw"


# Refused keys of a config: unknown ones, and DeepSpeed's own where another engine runs.


def refuse_unknown(top: Fields, keys: Keys = TOP) -> None:
    """Stop at a key that no engine reads, in any section.

    Raises:
        CannotRun: naming the key and the nearest known one.
    """
    for key in top.values:
        if key not in keys.names:
            raise CannotRun(f"config: {top.name(str(key))} is not known; {_remedy(str(key), keys)}")
    for key, section in keys.sections.items():
        refuse_unknown(top.section(key), section)
    for key in keys.switched:
        top.section(key)


def refuse_deepspeed_keys(script: ScriptConfig, configuration: Configuration) -> None:
    """Stop at what only DeepSpeed does, when another engine runs.

    Raises:
        CannotRun: naming the keys.
    """
    if configuration.backend == "deepspeed":
        return
    beyond = sorted(_keys_beyond(Fields(script.values), TOP))
    if beyond:
        name = "backend 'native'" if configuration.backend == "native" else f"strategy {configuration.strategy!r}"
        raise CannotRun(
            f"config: {name} cannot do what {', '.join(beyond)} asks; leave it out, or use zero1, zero2 or zero3 with"
            " backend 'deepspeed'"
        )


def _keys_beyond(fields: Fields, keys: Keys) -> Iterator[str]:
    """Yield the keys that demand more of DeepSpeed than its default."""
    for key, default in keys.defaults.items():
        value = fields.values.get(key)
        if fields.has(key) and value != default and value not in ({}, [], ()):
            yield fields.name(key)
    for key in keys.switched:
        if fields.section(key).flag("enabled"):
            yield fields.name(key)
    for key, section in keys.sections.items():
        yield from _keys_beyond(fields.section(key), section)


def _remedy(key: str, keys: Keys) -> str:
    if home := _section_of(key, TOP):
        return f"it belongs in {home}"
    near = get_close_matches(key, keys.names, n=1) or get_close_matches(key.lower(), keys.names, n=1)
    return f"did you mean {near[0]}?" if near else "docs/reference/config.md lists the keys"


def _section_of(key: str, keys: Keys, path: str = "") -> str | None:
    """Return the section that has a key; None where none does."""
    for name, section in keys.sections.items():
        inner = f"{path}.{name}" if path else name
        if key in section.names and key not in _COMMON:
            return inner
        if below := _section_of(key, section, inner):
            return below
    return None


_COMMON = frozenset(
    {"enabled", "type", "params", "output_path", "job_name", "device", "nvme_path", "pin_memory", "buffer_count"}
)
"""Keys of several sections, which say nothing of where one belongs."""
