"""Saving: what a checkpoint takes beside weights and optimizer states, which stay where they are.

`sharded` is what `strategies/checkpoint.py` does through `torch.distributed.checkpoint`: each rank copies one tensor
after another to the host and writes it, so that the device holds nothing more. `full` is the whole model's weights on
rank 0, as `save_pretrained` wants them: FSDP2 and ZeRO-3 gather one tensor after another on the device and move it to
the host (torch `checkpoint/state_dict.py` with `cpu_offload`; DeepSpeed 0.19 `_zero3_consolidated_16bit_state_dict`).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.memory.ledger import Ledger, States
from planner.memory.recipe import Recipe
from planner.vocabulary import FSDP_STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Bytes beside the resident states: `device` on one device; `host_of_rank_0` and `host_of_others` in a process."""

    device: Ledger
    host_of_rank_0: float
    host_of_others: float


def saving_of(job: Job, recipe: Recipe, states: States) -> Saving:
    """What a checkpoint of the workload's kind takes; nothing where none was asked for."""
    matrix = _largest_matrix(job)
    if job.workload.save == "none":
        return Saving(device=Ledger(), host_of_rank_0=0, host_of_others=0)
    if job.workload.save == "sharded":
        # One tensor at a time; ZeRO's optimizer states are one flat tensor of the partition.
        size = 4.0 * states.local if job.configuration.zero_stage else 4.0 * matrix / job.configuration.dp_shard
        weights = recipe.weight * states.elements if job.configuration.zero_stage in (1, 2) else 0.0
        return Saving(device=Ledger(), host_of_rank_0=max(size, weights), host_of_others=size)
    return Saving(
        device=Ledger(temporaries=recipe.weight * _gathered(job) * matrix),
        host_of_rank_0=recipe.weight * job.counts.total,
        host_of_others=0,
    )


def _gathered(job: Job) -> int:
    """Whole tensors on every rank's device at once: DTensor copies what it gathered (measured on ranks)."""
    if job.configuration.strategy in FSDP_STRATEGIES:
        return 2
    return 1 if job.configuration.zero_stage == 3 else 0


def _largest_matrix(job: Job) -> int:
    largest = max((block.largest_matrix for block in job.counts.blocks), default=0)
    return max(largest, job.facts.vocab_size * job.facts.hidden_size)
