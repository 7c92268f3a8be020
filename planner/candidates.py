"""Candidates: every shape a plan may take on a cluster, before anything is priced.

A shape fixes the strategy, the degrees, checkpointing and offload; the micro-batch is found later. A strategy that
makes no sense on the cluster yields a reason instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from planner import vocabulary as words
from planner.estimate import offloads_of
from planner.request import Request

MODEL_PARALLEL_STRATEGIES: tuple[words.Strategy, ...] = ("ddp", "zero1", "fsdp")
"""Strategies that are combined with tensor and pipeline parallelism in practice (Megatron's and torchtitan's)."""
LARGEST_PIPELINE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A configuration without its micro-batch."""

    strategy: words.Strategy
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    checkpointing: words.Checkpointing = "none"
    offload: words.Offload = "none"

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def is_model_parallel(self) -> bool:
        return self.tp > 1 or self.pp > 1


def inapplicable(request: Request, strategy: words.Strategy) -> str:
    """Why a strategy is not considered on this cluster; empty when it is."""
    cluster = request.cluster
    if request.strategies is not None and strategy not in request.strategies:
        return "not installed or not asked for"
    if strategy == "single" and cluster.gpus > 1:
        return f"uses one of the {cluster.gpus} GPUs"
    if strategy in ("ddp", "hsdp", "fsdp-grad-op") and cluster.gpus == 1:
        return "needs more than one GPU"
    if strategy in words.FSDP_STRATEGIES and request.workload.optimizer == "adafactor":
        return "torch's Adafactor cannot step on shards"
    if strategy in words.FSDP_STRATEGIES and request.facts.kind == "vision-text":
        return "torch's FSDP2 cannot shard the scalar logit_scale"
    if strategy == "hsdp" and (cluster.nodes == 1 or cluster.gpus_per_node == 1):
        return "the same as fsdp unless there are several nodes of several GPUs"
    return ""


def shapes(request: Request) -> Iterator[Shape]:
    """Every shape of every applicable strategy."""
    for strategy in words.STRATEGIES:
        if inapplicable(request, strategy):
            continue
        for tp, pp in _model_parallel_degrees(request, strategy):
            yield from _with_memory_savers(request, strategy, tp, pp)


def _with_memory_savers(request: Request, strategy: words.Strategy, tp: int, pp: int) -> Iterator[Shape]:
    ranks = request.cluster.gpus // (tp * pp)
    replicate, shard = _split(request, strategy, ranks)
    offloads: tuple[words.Offload, ...] = ("none", *(offloads_of(strategy) if tp * pp == 1 else ()))
    for offload in offloads:
        if offload == "none" and shard == 1 and request.cluster.gpus == 1 and strategy != "single":
            continue  # one GPU has nothing to shard: ZeRO and FSDP help there only by offload
        if offload != "none" and request.cluster.device.is_cpu:
            continue
        if offload == "nvme" and not request.cluster.nvme_bytes_per_node:
            continue
        for checkpointing in words.CHECKPOINTINGS:
            yield Shape(
                strategy=strategy,
                dp_replicate=replicate,
                dp_shard=shard,
                tp=tp,
                pp=pp,
                checkpointing=checkpointing,
                offload=offload,
            )


def _split(request: Request, strategy: words.Strategy, ranks: int) -> tuple[int, int]:
    """dp_replicate and dp_shard of a strategy over `ranks` data-parallel ranks."""
    if strategy in ("single", "ddp"):
        return ranks, 1
    if strategy == "hsdp":
        return request.cluster.nodes, ranks // request.cluster.nodes
    return 1, ranks


def _model_parallel_degrees(request: Request, strategy: words.Strategy) -> Iterator[tuple[int, int]]:
    """(tp, pp) pairs: tp inside a node and dividing the heads, pp up to the depth, both powers of two."""
    yield 1, 1
    facts, cluster = request.facts, request.cluster
    if strategy not in MODEL_PARALLEL_STRATEGIES or facts.kind not in ("decoder", "encoder") or cluster.device.is_cpu:
        return
    for tp in _powers_of_two(cluster.gpus_per_node):
        if facts.num_heads % tp or facts.num_kv_heads % min(tp, facts.num_kv_heads):
            continue
        for pp in _powers_of_two(min(cluster.gpus // tp, facts.num_layers, LARGEST_PIPELINE)):
            if tp * pp > 1 and cluster.gpus % (tp * pp) == 0 and facts.num_layers % pp == 0:
                yield tp, pp


def _powers_of_two(largest: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(largest.bit_length()) if 1 << power <= largest)


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a number in ascending order: the micro-batches that keep the global batch whole."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(small + [number // value for value in reversed(small) if value * value != number])
