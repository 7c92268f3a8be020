"""Memory of single, DDP and FSDP2, and of their optimizers' steps, against the strategies themselves, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.states import states_of
from planner.cost.memory.timeline import buffers_of
from planner.cost.precision import recipe_of
from planner.models.counting.count import count_parameters
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration
from strategies.tracing.live import facts_from_module, meta_device
from tests.planner.cost.memory.sharded_steps import Sizes, Stack, true_peaks

# A token's activations and scalars, each rounded up to 512 bytes, are what the instants below leave out.
ALLOWANCE = 96 * 1024
ODD, TIED = Sizes(), Sizes(tied=True)
WIDE_BLOCKS = Sizes(rows=300, blocks=6)

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adamw-fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-forloop": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
SHARDED = [
    (ODD, {"strategy": "fsdp", "dp_shard": 1}),
    (ODD, {"strategy": "fsdp", "dp_shard": 2}),
    (ODD, {"strategy": "fsdp", "dp_shard": 64}),
    (TIED, {"strategy": "fsdp", "dp_shard": 8, "precision": "fp32"}),
    (WIDE_BLOCKS, {"strategy": "fsdp", "dp_shard": 8}),
    (WIDE_BLOCKS, {"strategy": "fsdp", "dp_shard": 8, "precision": "bf16-pure"}),
    (WIDE_BLOCKS, {"strategy": "fsdp-grad-op", "dp_shard": 8}),
    (WIDE_BLOCKS, {"strategy": "hsdp", "dp_shard": 4, "dp_replicate": 2}),
    (WIDE_BLOCKS, {"strategy": "hsdp", "dp_shard": 4, "dp_replicate": 2, "gradient_accumulation_steps": 2}),
    (ODD, {"strategy": "fsdp-grad-op", "dp_shard": 2, "dp_replicate": 4, "gradient_accumulation_steps": 3}),
    (ODD, {"strategy": "fsdp", "dp_shard": 8, "gradient_accumulation_steps": 2}),
    (ODD, {"strategy": "fsdp", "dp_shard": 8, "gradient_accumulation_steps": 2, "sync_each_micro_batch": False}),
    (ODD, {"strategy": "fsdp", "dp_shard": 8, "gradient_accumulation_steps": 3, "sync_each_micro_batch": False}),
]
WHOLE = [
    (ODD, {"strategy": "ddp", "dp_replicate": 8, "precision": "fp32"}),
    (ODD, {"strategy": "ddp", "dp_replicate": 8, "precision": "bf16-pure", "gradient_accumulation_steps": 2}),
]
STEPS = [(ODD, {"strategy": "single", "optimizer": name, "precision": "fp32"}) for name in OPTIMIZERS]
STEPS += [(ODD, {"strategy": "fsdp", "dp_shard": 8, "optimizer": name}) for name in ("adamw", "adamw-fused", "sgd")]


@pytest.mark.parametrize(("sizes", "options"), [*SHARDED, *WHOLE, *STEPS], ids=str)
@pytest.mark.sweep(every=6)
def test_a_strategy_holds_what_was_planned(sizes: Sizes, options: dict[str, Any]) -> None:
    configuration = configuration_of(**options)
    true = true_peaks(sizes, configuration, OPTIMIZERS[configuration.optimizer])
    planned = planned_peaks(sizes, configuration)
    assert {phase: abs(planned[phase] - true[phase]) < ALLOWANCE for phase in true} == dict.fromkeys(true, True), (
        planned,
        true,
    )


def configuration_of(**options: Any) -> Configuration:
    chosen: dict[str, Any] = {
        "precision": "bf16",
        "optimizer": "adamw-forloop",
        "gradient_accumulation_steps": 1,
        **options,
    }
    ranks = options.get("dp_shard", 1) * options.get("dp_replicate", 1)
    batch = ranks * chosen["gradient_accumulation_steps"]
    return Configuration(backend="torch", micro_batch_size=1, global_batch_size=batch, sequence_length=1, **chosen)


def planned_peaks(sizes: Sizes, configuration: Configuration) -> dict[str, float]:
    job = _job(sizes, configuration)
    recipe = recipe_of(job)
    states = states_of(job, recipe)
    buffers = buffers_of(job, recipe, states)
    always = Ledger(parameters=states.parameters, optimizer=states.optimizer)
    peaks = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    moments = [(instant.phase, buffers.at(instant)) for instant in _instants(sizes, job)]
    for phase, ledger in (*moments, *buffers.own_moments()):
        named = "forward" if phase == "loss" else phase
        peaks[named] = max(peaks[named], (always + ledger).total)
    return peaks


def _job(sizes: Sizes, configuration: Configuration) -> Job:
    with meta_device():
        facts = facts_from_module(Stack(sizes))
    # As on a GPU: gloo's copies and counters in device memory are a CPU's own.
    cluster = resolve_cluster(HardwareRequest(gpu="a100-80gb", gpus=configuration.world_size))
    options = WorkOptions(seq_len=1, global_batch=configuration.global_batch_size, precision=configuration.precision)
    workload = make_request(facts, cluster, options).workload
    return Job(
        facts=facts,
        counts=count_parameters(facts),
        workload=workload,
        cluster=cluster,
        configuration=configuration,
    )


def _instants(sizes: Sizes, job: Job) -> Iterator[Instant]:
    """The moments of the stack's step: gradients made, and no activations."""
    block, table = job.counts.blocks[0].parameters, sizes.rows * sizes.width
    common: dict[str, Any] = {"activations": 0.0, "cast": 0.0, "blocks": sizes.blocks}
    yield Instant(phase="loss", unit="head", blocks_done=sizes.blocks, **common)
    yield Instant(phase="backward", unit="head", unit_gradients=table, **common)
    for blocks_done in range(sizes.blocks):
        for edge in (True, False):
            yield Instant(phase="forward", unit="block", blocks_done=blocks_done, enters=edge, **common)
            yield Instant(
                phase="backward",
                unit="block",
                unit_gradients=block,
                done_gradients=table + blocks_done * block,
                blocks_done=blocks_done,
                leaves=edge,
                **common,
            )
    # A tied table's second gradient and the sum of both are made beside the first.
    yield Instant(
        phase="backward",
        unit="table",
        unit_gradients=table * (2 if sizes.tied else 1),
        done_gradients=table + sizes.blocks * block,
        blocks_done=sizes.blocks,
        **common,
    )
