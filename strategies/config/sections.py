"""The sections of a config, one function each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from planner.vocabulary import Method, Offload
from strategies.config.fields import Fields
from strategies.config.values import (
    ActivationSection,
    CheckpointSection,
    CommunicationDtype,
    CommunicationSection,
    Compression,
    DataSection,
    Fp16Section,
    LoraSection,
    MonitorSettings,
    NamedParts,
    Partition,
    PipelineSection,
    ProfilerSection,
    Threshold,
    ZeroSection,
)
from strategies.errors import CannotRun

# `zero_optimization`: the stage, buckets, and what leaves the GPU.


_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}


def zero_section(fields: Fields) -> ZeroSection:
    """The section as a value.

    Raises:
        CannotRun: a value is not of its kind, or NVMe has no path.
    """
    optimizer, param = fields.section("offload_optimizer"), fields.section("offload_param")
    default = ZeroSection()
    offload = _offload(optimizer, param)
    path = optimizer.maybe_text("nvme_path") or param.maybe_text("nvme_path")
    if offload == "nvme" and path is None:
        raise CannotRun(f"config: {optimizer.name('nvme_path')} is missing; name a directory on the NVMe drive")
    pinned = optimizer if optimizer.values else param
    return ZeroSection(
        stage=_stage(fields),
        reduce_bucket_size=fields.maybe_whole("reduce_bucket_size", least=1),
        param_persistence_threshold=fields.maybe_whole("stage3_param_persistence_threshold"),
        offload=offload,
        offload_ratio=optimizer.number("ratio", default.offload_ratio, most=1.0),
        nvme_path=path,
        pin_memory=pinned.flag("pin_memory", default.pin_memory),
        buffer_count=optimizer.whole("buffer_count", default.buffer_count, least=1),
    )


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


_PARTITIONS: Mapping[str, Partition] = {
    **{name: name for name in get_args(Partition)},
    # DeepSpeed's word for a cut by measured time.
    "best": "seconds",
    "profile": "seconds",
}


def pipeline_section(fields: Fields) -> PipelineSection:
    """`pipeline`, with DeepSpeed's words of `partition_method` for `partition`.

    Raises:
        CannotRun: a value is not of its kind.
    """
    return PipelineSection(
        stages=fields.maybe_whole("stages", least=1), partition=fields.one_of("partition", _PARTITIONS, "uniform")
    )


# The section `monitor`, and the same settings by name.


def monitor_section(fields: Fields) -> MonitorSettings:
    """`monitor`.

    Raises:
        CannotRun: a value is not of its kind.
    """
    sample_seconds = fields.maybe_number("sample_seconds")
    if sample_seconds == 0:
        fields.refuse("sample_seconds", "a number above 0")
    slowdown = fields.maybe_number("slowdown")
    if slowdown is not None and 0 < slowdown <= 1:
        fields.refuse("slowdown", "a number above 1, or 0 for none")
    return MonitorSettings(
        enabled=fields.maybe_flag("enabled"),
        output_path=fields.text("output_path", MonitorSettings().output_path),
        sample_seconds=sample_seconds,
        loss_spike=fields.maybe_number("loss_spike"),
        slowdown=slowdown,
        memory_growth=fields.maybe_number("memory_growth"),
        gpu=fields.flag("gpu", True),
        cpu=fields.flag("cpu", True),
        network=fields.flag("network", True),
        thresholds=_thresholds(fields.section("thresholds")),
    )


def _thresholds(fields: Fields) -> dict[str, Threshold]:
    """`{"loss": {"above": 10}}`; a figure that has none is left out."""
    found = {}
    for name in fields.values:
        limits = fields.section(str(name))
        for key in limits.values:
            if key not in ("above", "below"):
                fields.refuse(str(name), 'written as {"above": number} or {"below": number}')
        found[str(name)] = Threshold(**{key: limits.real(key) for key in ("above", "below") if limits.has(key)})
    return found


def read_settings(values: Mapping[str, Any], *, place: str) -> MonitorSettings:
    """Settings from a dictionary with the keys of the section.

    Raises:
        CannotRun: a key is not known, or a value is not of its kind.
    """
    known = [name for name in MonitorSettings.__dataclass_fields__ if name not in ("enabled", "output_path")]
    for name in values:
        if name not in known:
            raise CannotRun(f"{place}: {name} is not known; it can be {', '.join(known)}")
    return monitor_section(Fields(values, place))


_COMMUNICATION_DTYPES: dict[str, CommunicationDtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bfp16": "bf16"}
_COMPRESSIONS: dict[str, Compression] = {"none": "none", "fp16": "fp16", "bf16": "bf16", "int8": "int8"}
_POLICIES = {"none": "none", "selective": "selective", "full": "full"}


def communication_dtype(fields: Fields, key: str) -> CommunicationDtype | None:
    """A dtype by DeepSpeed's name."""
    found: CommunicationDtype | None = fields.one_of(key, _COMMUNICATION_DTYPES, None)
    return found


def named_parts(top: Fields, key: str) -> NamedParts | None:
    """`optimizer` or `scheduler`: `{"type": name, "params": {...}}`.

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


def fp16_section(fields: Fields) -> Fp16Section:
    """`fp16`, but for whether it is enabled."""
    return Fp16Section(
        loss_scale=fields.number("loss_scale", 0.0),
        initial_scale_power=fields.whole("initial_scale_power", 16),
        loss_scale_window=fields.whole("loss_scale_window", 1000, least=1),
        hysteresis=fields.whole("hysteresis", 2, least=1),
        min_loss_scale=fields.number("min_loss_scale", 1.0),
    )


def communication_section(top: Fields) -> CommunicationSection:
    """`communication`, with DeepSpeed's `communication_data_type` where it does not say."""
    own = top.section("communication")
    bucket = own.real("bucket_cap_mb")
    if bucket is not None and not 0 < bucket < float("inf"):
        own.refuse("bucket_cap_mb", "a number above 0")
    zero = top.section("zero_optimization")
    if bucket is not None and zero.has("reduce_bucket_size"):
        raise CannotRun(
            f"config: {own.name('bucket_cap_mb')} and {zero.name('reduce_bucket_size')} are both set; leave one out"
        )
    return CommunicationSection(
        data_type=communication_dtype(own, "data_type") or communication_dtype(top, "communication_data_type"),
        compression=own.one_of("compression", _COMPRESSIONS, "none"),
        error_feedback=own.flag("error_feedback", True),
        block_size=own.whole("block_size", CommunicationSection().block_size, least=1),
        bucket_mib=bucket,
    )


def activation_section(fields: Fields) -> ActivationSection:
    """`activation_checkpointing`; `enabled` is short for the policies full and none."""
    is_on = fields.maybe_flag("enabled")
    default = None if is_on is None else "full" if is_on else "none"
    return ActivationSection(
        policy=fields.one_of("policy", _POLICIES, default), cpu_checkpointing=fields.flag("cpu_checkpointing")
    )


def log_settings(fields: Fields) -> dict[str, Any]:
    """`tensorboard` or `csv_monitor`."""
    settings: dict[str, Any] = {"enabled": fields.flag("enabled")}
    for key in ("output_path", "job_name"):
        if fields.has(key) and fields.text(key, ""):
            settings[key] = fields.text(key, "")
    return settings


def profiler_section(top: Fields) -> ProfilerSection:
    """`profiler`."""
    own, default = top.section("profiler"), ProfilerSection()
    return ProfilerSection(
        enabled=own.flag("enabled"),
        wait=own.whole("wait", default.wait),
        warmup=own.whole("warmup", default.warmup),
        active=own.whole("active", default.active, least=1),
        output_path=own.text("output_path", default.output_path),
    )


def data_section(fields: Fields) -> DataSection:
    """`dataloader`."""
    return DataSection(
        num_workers=fields.whole("num_workers", 0),
        pin_memory=fields.maybe_flag("pin_memory"),
        bad_samples=fields.whole("bad_samples", 0),
        seed=fields.maybe_whole("seed"),
    )


def checkpoint_section(fields: Fields) -> CheckpointSection:
    """`checkpoint`."""
    return CheckpointSection(
        directory=fields.maybe_text("directory"),
        keep_last=fields.maybe_whole("keep_last", least=1),
        asynchronous=fields.flag("asynchronous"),
        every_steps=fields.maybe_whole("every_steps", least=1),
        trainable_only=fields.flag("trainable_only"),
    )


_ADAPTERS: dict[str, Method] = {"lora": "lora", "dora": "dora", "qlora": "qlora"}


def lora_section(top: Fields) -> LoraSection | None:
    """`lora`; None where the config has none."""
    if not top.has("lora"):
        return None
    fields, default = top.section("lora"), LoraSection()
    dropout = fields.number("dropout", default.dropout, most=1.0)
    return LoraSection(
        method=fields.one_of("method", _ADAPTERS, default.method),
        rank=fields.whole("rank", default.rank, least=1),
        alpha=fields.real("alpha"),
        targets=fields.text("targets", default.targets),
        dropout=dropout,
    )


def kernels_section(top: Fields) -> dict[str, str]:
    """`kernels`: providers by kernel, `all` for a word that is meant for every one."""
    given = top.values.get("kernels")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"all": given}
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        top.refuse("kernels", 'a provider\'s name, "auto", or an object such as {"rms_norm": "liger"}')
    return {str(name): value for name, value in given.items()}
