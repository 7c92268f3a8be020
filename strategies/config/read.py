"""`read_config`: from a dictionary or a JSON file to the values that every strategy reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware_db.handed_in import read_json
from planner.vocabulary import Precision
from strategies.config.fields import Fields, in_deepspeeds_words
from strategies.config.known import for_deepspeed
from strategies.config.limits import refuse_unknown
from strategies.config.sections import (
    activation_section,
    communication_dtype,
    communication_section,
    kernels_section,
    log_settings,
    lora_section,
    monitor_section,
    named_parts,
    zero_section,
)
from strategies.config.values import (
    CheckpointSection,
    CsvSection,
    DataSection,
    Fp16Section,
    PipelineSection,
    ProfilerSection,
    ScriptConfig,
    TensorboardSection,
)
from strategies.errors import BrokenFile, CannotRun


def read_config(config: Mapping[str, Any] | str | Path | None) -> ScriptConfig:
    """Read the config of a script from a dictionary, a JSON file, or nothing.

    Raises:
        BrokenFile: the file is not JSON with an object at the top.
        CannotRun: a key is not known, or a value is not of its kind.
    """
    if not (config is None or isinstance(config, (Mapping, str, Path))):
        raise CannotRun(f"config is {config!r}; it must be a dictionary or the path of a JSON file")
    given = {} if config is None else dict(config) if isinstance(config, Mapping) else read_object(Path(config))
    top = Fields(in_deepspeeds_words(given))
    refuse_unknown(top)
    communication = communication_section(top)
    return ScriptConfig(
        train_batch_size=top.maybe_whole("train_batch_size", least=1),
        micro_batch_size=top.maybe_whole("train_micro_batch_size_per_gpu", least=1),
        gradient_accumulation_steps=top.maybe_whole("gradient_accumulation_steps", least=1),
        gradient_clipping=top.number("gradient_clipping", 0.0),
        precision=_precision(top),
        optimizer=named_parts(top, "optimizer"),
        scheduler=named_parts(top, "scheduler"),
        fp16=top.section("fp16").into(Fp16Section),
        zero=zero_section(top.section("zero_optimization")),
        communication=communication,
        accumulate_dtype=communication_dtype(top.section("data_types"), "grad_accum_dtype"),
        activations=activation_section(top.section("activation_checkpointing")),
        tensorboard=TensorboardSection(**log_settings(top.section("tensorboard"))),
        csv_monitor=CsvSection(**log_settings(top.section("csv_monitor"))),
        profiler=top.section("profiler").into(ProfilerSection),
        monitor=monitor_section(top.section("monitor")),
        checkpoint=top.section("checkpoint").into(CheckpointSection),
        data=top.section("dataloader").into(DataSection),
        lora=lora_section(top),
        train_only=top.text("train_only", ""),
        weights=top.text("weights", ""),
        kernels=kernels_section(top),
        wall_clock_breakdown=top.flag("wall_clock_breakdown"),
        memory_breakdown=top.flag("memory_breakdown"),
        steps_per_print=top.maybe_whole("steps_per_print", least=1),
        pipeline=top.section("pipeline").into(PipelineSection),
        values=for_deepspeed(top.values, communication),
    )


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a DeepSpeed JSON file.

    Raises:
        BrokenFile: the file cannot be read or is not JSON with an object at the top.
    """
    values = read_json(path, "correct it, or give a dictionary")
    if not isinstance(values, dict):
        raise BrokenFile(path, "does not hold a JSON object", 'write it as {"train_batch_size": ...}')
    return values


def _precision(top: Fields) -> Precision | None:
    bf16, fp16 = (top.section(name).maybe_flag("enabled") for name in ("bf16", "fp16"))
    if bf16 and fp16:
        raise CannotRun("config: bf16 and fp16 are both enabled; enable one")
    if bf16:
        return "bf16-pure" if _keeps_no_fp32(top.section("bf16")) else "bf16"
    # A config that switches one off asks for fp32; one that mentions neither leaves the choice to the plan.
    return "fp16" if fp16 else "fp32" if False in (bf16, fp16) else None


def _keeps_no_fp32(bf16: Fields) -> bool:
    """Return whether masters, gradients and optimizer states stay in bf16.

    Raises:
        CannotRun: one of the two is set without the other.
    """
    masters, states = (bf16.flag(key) for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"))
    if masters != states:
        raise CannotRun(
            "config: bf16_master_weights_and_grads and bf16_optimizer_states must both be true or both be false"
        )
    return masters
