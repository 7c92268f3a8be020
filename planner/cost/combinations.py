"""What of a plan nothing here runs, and which degrees, strategies and options do not go together.

The one table that the search, the estimate and the engine read, so that they say the same sentence.
"""

from __future__ import annotations

from planner import vocabulary as words
from planner.types.plan import Configuration


def refusal(configuration: Configuration) -> str:
    """Why `dsplan run` and `dsplan.initialize` cannot run a configuration; empty where they can."""
    if configuration.precision in words.SCALED_PRECISIONS:
        return (
            f"dsplan run has no {configuration.precision} products; accelerate with torchao, torchtitan and Megatron-LM"
            " run them"
        )
    degrees = {name: getattr(configuration, name) for name in ("tp", "pp", "cp", "ep") if name in _NOT_RUN}
    split = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    if not split:
        return ""
    trainer = "torchtitan" if configuration.strategy in words.FSDP_STRATEGIES else "megatron"
    written = trainer if configuration.zero_stage < 2 else "torchrun"
    return (
        f"dsplan run cannot yet run {split}; {other_trainer(configuration)} does: dsplan emit --format {written} can"
        " write it"
    )


_NOT_RUN = ("tp", "pp", "cp", "ep")
"""Degrees that are planned and not run."""


def other_trainer(configuration: Configuration) -> str:
    """The trainer that people run such splits of layers with: torchtitan shards by FSDP2, Megatron-LM keeps replicas
    and shards their optimizer, Megatron-DeepSpeed shards further by ZeRO."""
    if configuration.strategy in words.FSDP_STRATEGIES:
        return "torchtitan"
    return "Megatron-DeepSpeed" if configuration.strategy in ("zero2", "zero3") else "Megatron-LM"
