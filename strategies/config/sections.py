"""The sections of a config that are more than a dataclass's fields, one function each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from planner.vocabulary import Offload
from strategies.config.fields import Fields
from strategies.config.values import (
    ActivationSection,
    CommunicationDtype,
    CommunicationSection,
    LoraSection,
    MonitorSettings,
    NamedParts,
    Threshold,
    ZeroSection,
)
from strategies.errors import CannotRun

# `zero_optimization`: the stage, buckets, and what leaves the GPU.
_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}


def zero_section(fields: Fields) -> ZeroSection:
    """Read the section with the two below it.

    Raises:
        CannotRun: a value is not of its kind, or NVMe has no path.
    """
    optimizer, param = fields.section("offload_optimizer"), fields.section("offload_param")
    offload = _offload(optimizer, param)
    path = optimizer.maybe_text("nvme_path") or param.maybe_text("nvme_path")
    if offload == "nvme" and path is None:
        raise CannotRun(f"config: {optimizer.name('nvme_path')} is missing; name a directory on the NVMe drive")
    pinned = optimizer if optimizer.values else param
    return ZeroSection(
        stage=_stage(fields),
        reduce_bucket_size=fields.maybe_whole("reduce_bucket_size", least=1),
        param_persistence_threshold=fields.maybe_whole("stage3_param_persistence_threshold"),
        shard=_shard(fields),
        hpz_partition_size=fields.whole("zero_hpz_partition_size", 1, least=1),
        quantized_weights=fields.flag("zero_quantized_weights"),
        quantized_gradients=fields.flag("zero_quantized_gradients"),
        offload=offload,
        offload_ratio=optimizer.number("ratio", ZeroSection().offload_ratio, most=1.0),
        nvme_path=path,
        pin_memory=pinned.maybe_flag("pin_memory"),
        buffer_count=optimizer.maybe_whole("buffer_count", least=1),
    )


def _shard(fields: Fields) -> int | None:
    """Return MiCS's number of ranks, of which -1, its default, is no number."""
    if fields.values.get("mics_shard_size") == -1:
        return None
    return fields.maybe_whole("mics_shard_size", least=1)


def _stage(fields: Fields) -> int | None:
    if not fields.has("stage"):
        return None
    value = fields.values["stage"]
    if isinstance(value, bool) or value not in range(4):
        fields.refuse("stage", "0, 1, 2 or 3")
    return int(value)


def _offload(optimizer: Fields, param: Fields) -> Offload | None:
    """Return the plan's word for the two devices, or None if the section names neither.

    Raises:
        CannotRun: parameters leave the GPU and the optimizer does not.
    """
    of_optimizer, of_param = (fields.one_of("device", _DEVICES, None) for fields in (optimizer, param))
    if of_param in ("cpu", "nvme") and of_optimizer in (None, "none"):
        raise CannotRun(
            f"config: {param.name('device')} is {of_param!r} while the optimizer stays on the GPU; set"
            f" {optimizer.name('device')} too"
        )
    if "nvme" in (of_optimizer, of_param):
        return "nvme"
    if of_param == "cpu":
        return "all"
    if of_optimizer == "cpu":
        return "optimizer"
    return "none" if "none" in (of_optimizer, of_param) else None


def monitor_section(fields: Fields) -> MonitorSettings:
    """Read `monitor`.

    Raises:
        CannotRun: a value is not of its kind.
    """
    settings = fields.into(MonitorSettings, thresholds=_thresholds(fields.section("thresholds")))
    if settings.sample_seconds == 0:
        fields.refuse("sample_seconds", "a number above 0")
    if settings.slowdown is not None and 0 < settings.slowdown <= 1:
        fields.refuse("slowdown", "a number above 1, or 0 for none")
    return settings


def _thresholds(fields: Fields) -> dict[str, Threshold]:
    """Read `{"loss": {"above": 10}}`; a figure that has none is left out."""
    thresholds = {}
    for name in fields.values:
        limits = fields.section(str(name))
        for key in limits.values:
            if key not in ("above", "below"):
                fields.refuse(str(name), 'written as {"above": number} or {"below": number}')
        thresholds[str(name)] = Threshold(**{key: limits.real(key) for key in ("above", "below") if limits.has(key)})
    return thresholds


def read_settings(values: Mapping[str, Any], *, where: str) -> MonitorSettings:
    """Read settings from a dictionary with the keys of the section; `where` is how messages call it.

    Raises:
        CannotRun: a key is not known, or a value is not of its kind.
    """
    names = [field.name for field in fields_of(MonitorSettings) if field.name not in ("enabled", "output_path")]
    for name in values:
        if name not in names:
            raise CannotRun(f"{where}: {name} is not known; it can be {', '.join(names)}")
    return monitor_section(Fields(values, where))


_COMMUNICATION_DTYPES: dict[str, CommunicationDtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bfp16": "bf16"}
_POLICIES = {"none": "none", "selective": "selective", "full": "full"}


def communication_dtype(fields: Fields, key: str) -> CommunicationDtype | None:
    """Read a dtype by DeepSpeed's name."""
    dtype: CommunicationDtype | None = fields.one_of(key, _COMMUNICATION_DTYPES, None)
    return dtype


def named_parts(top: Fields, key: str) -> NamedParts | None:
    """Read `optimizer` or `scheduler`: `{"type": name, "params": {...}}`.

    Raises:
        CannotRun: it has no `type`.
    """
    section = top.section(key)
    if not section.values:
        return None
    if not section.has("type"):
        raise CannotRun(f'config: {key} has no type; write it as {{"type": name, "params": {{...}}}}')
    params = {name: value for name, value in section.section("params").values.items() if value not in (None, "auto")}
    return NamedParts(name=section.text("type", ""), params=params)


def communication_section(top: Fields) -> CommunicationSection:
    """Read `communication`, with DeepSpeed's `communication_data_type` where it does not say."""
    own = top.section("communication")
    bucket = own.real("bucket_cap_mb")
    if bucket is not None and not 0 < bucket < float("inf"):
        own.refuse("bucket_cap_mb", "a number above 0")
    zero = top.section("zero_optimization")
    if bucket is not None and zero.has("reduce_bucket_size"):
        raise CannotRun(
            f"config: {own.name('bucket_cap_mb')} and {zero.name('reduce_bucket_size')} are both set; leave one out"
        )
    dtype = communication_dtype(own, "data_type") or communication_dtype(top, "communication_data_type")
    return own.into(CommunicationSection, data_type=dtype, bucket_mib=bucket)


def activation_section(fields: Fields) -> ActivationSection:
    """Read `activation_checkpointing`; `enabled` is short for the policies full and none."""
    is_on = fields.maybe_flag("enabled")
    default = None if is_on is None else "full" if is_on else "none"
    return ActivationSection(
        policy=fields.one_of("policy", _POLICIES, default), cpu_checkpointing=fields.flag("cpu_checkpointing")
    )


def log_settings(fields: Fields) -> dict[str, Any]:
    """Read `tensorboard` or `csv_monitor`, without what is empty."""
    settings: dict[str, Any] = {"enabled": fields.flag("enabled")}
    for key in ("output_path", "job_name"):
        if fields.has(key) and fields.text(key, ""):
            settings[key] = fields.text(key, "")
    return settings


def lora_section(top: Fields) -> LoraSection | None:
    """Read `lora`; None where the config has none."""
    fields = top.section("lora")
    return fields.into(LoraSection, alpha=fields.real("alpha")) if top.has("lora") else None


def kernels_section(top: Fields) -> dict[str, str]:
    """Read `kernels`: providers by kernel, `all` for a word that is meant for every one."""
    given = top.values.get("kernels")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"all": given}
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        top.refuse("kernels", 'a provider\'s name, "auto", or an object such as {"rms_norm": "liger"}')
    return {str(name): value for name, value in given.items()}
