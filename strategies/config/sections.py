"""The sections of a config, one function each."""

from __future__ import annotations

from typing import Any

from strategies.config.fields import Fields
from strategies.config.values import (
    ActivationSection,
    CheckpointSection,
    CommunicationSection,
    Compression,
    DataSection,
    Fp16Section,
    NamedParts,
    ProfilerSection,
    WireType,
)
from strategies.errors import CannotRun

_WIRE_TYPES: dict[str, WireType] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bfp16": "bf16"}
_COMPRESSIONS: dict[str, Compression] = {"none": "none", "fp16": "fp16", "bf16": "bf16", "int8": "int8"}
_POLICIES = {"none": "none", "selective": "selective", "full": "full"}


def wire_type(fields: Fields, key: str) -> WireType | None:
    """A dtype by DeepSpeed's name."""
    found: WireType | None = fields.one_of(key, _WIRE_TYPES, None)
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
    return CommunicationSection(
        data_type=wire_type(own, "data_type") or wire_type(top, "communication_data_type"),
        compression=own.one_of("compression", _COMPRESSIONS, "none"),
        error_feedback=own.flag("error_feedback", True),
        block_size=own.whole("block_size", 1024, least=1),
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
    )
