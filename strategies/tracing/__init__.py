"""Training steps under fake tensors, and models read from live modules."""

from __future__ import annotations

from planner.types.plan import Configuration


def is_traced_whole(configuration: Configuration) -> bool:
    """Return whether a trace has all of a step: replicas, FSDP2, and our own ZeRO where nothing of it is elsewhere.

    Of DeepSpeed's it has the activations, and what is on the host it does not run.
    """
    if configuration.offload != "none":
        return False
    if not configuration.zero_stage:
        return True
    is_plain = configuration.gradient_compression != "int8" and not configuration.splits_model
    return configuration.backend == "native" and is_plain and configuration.dp_replicate == 1
