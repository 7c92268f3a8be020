"""What only DeepSpeed does: named in one line when another engine runs."""

from __future__ import annotations

from planner.plan import Configuration
from strategies.config.values import ScriptConfig
from strategies.errors import CannotRun

_READ_EVERYWHERE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_optimization",
    "communication",
    "activation_checkpointing",
    "tensorboard",
    "csv_monitor",
    "profiler",
    "checkpoint",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
    "communication_data_type",
    "data_types",
}


def refuse_deepspeed_keys(script: ScriptConfig, configuration: Configuration) -> None:
    """Stop at keys that only DeepSpeed reads, when another engine runs.

    Raises:
        CannotRun: naming the keys.
    """
    if configuration.backend == "deepspeed":
        return
    unread = sorted(set(script.values) - _READ_EVERYWHERE)
    if unread:
        name = "backend 'native'" if configuration.backend == "native" else f"strategy {configuration.strategy!r}"
        raise CannotRun(
            f"config: {name} does not read {', '.join(unread)}; pass optimizer= and lr_scheduler= to"
            " initialize, or use zero1, zero2 or zero3 with backend 'deepspeed'"
        )
