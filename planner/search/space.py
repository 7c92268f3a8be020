"""The candidate space: every layout a plan may have on a cluster, before anything is priced.

A layout fixes everything but the micro-batch, which is found later. A strategy that makes no sense on the cluster
yields a reason instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from itertools import product

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.cost.code_bases import code_base
from planner.cost.combinations import compresses, offloads_of, why_refused
from planner.cost.verdict import device_limit
from planner.errors import ContradictoryRequest
from planner.search.estimate import adapted_of, heads_left_over, why_indivisible, why_no_experts
from planner.search.request import Degrees, Request
from planner.types.plan import Configuration

MODEL_PARALLEL_STRATEGIES: tuple[words.Strategy, ...] = ("ddp", "zero1", "fsdp")
"""Strategies that are combined with tensor and pipeline parallelism in practice (Megatron's and torchtitan's)."""
LARGEST_PIPELINE = 64
LONG_SEQUENCE, TOKENS_PER_RANK = 32_768, 4_096
"""Tokens of a sample from which on it is spread over ranks, and that each of them has at the least."""
MOST_VIRTUAL_STAGES = 8
BYTES_PER_PARAMETER = 16
"""Of weights, gradients and Adam's states in mixed precision (ZeRO, arXiv 1910.02054, section 3.1)."""
OFFLOAD_RATIOS = (1.0, 0.75, 0.5, 0.25)
"""Shares of the optimizer's states that our own ZeRO is considered to offload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateLayout:
    """A configuration without its micro-batch."""

    strategy: words.Strategy
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    pp_schedule: words.Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    checkpointing: words.Checkpointing = "none"
    offload: words.Offload = "none"
    checkpoint_every: int = 1
    offload_ratio: float = 1.0
    sync_each_micro_batch: bool = True

    @property
    def splits_model(self) -> bool:
        """True if ranks share the work on one sample."""
        return self.tp * self.pp * self.cp * self.ep > 1

    @property
    def data_parallel(self) -> int:
        """Replicas of the model, sharded or not."""
        return self.dp_replicate * self.dp_shard


def why_inapplicable(request: Request, strategy: words.Strategy) -> str | None:
    """Return why a strategy is not considered on this cluster; None where it is."""
    cluster = request.cluster
    code = code_base(request.workload.code)
    if strategy not in code.strategies:
        return f"{code.name} has no {strategy}"
    if request.strategies is not None and strategy not in request.strategies:
        return "not installed or not asked for"
    if strategy == "single" and cluster.gpus > 1:
        return f"uses one of the {cluster.gpus} GPUs"
    if strategy in ("ddp", "hsdp", "fsdp-grad-op") and cluster.gpus == 1:
        return "needs more than one GPU"
    if strategy in words.FSDP_STRATEGIES and request.workload.optimizer == "adafactor":
        return "torch's Adafactor cannot step on shards"
    if strategy in words.ZERO_STAGES and request.workload.optimizer == "muon" and request.zero_backend == "deepspeed":
        return "DeepSpeed cuts matrices, which Muon steps whole; --backend native does not"
    beside = adapted_of(request.workload)
    if strategy in words.ZERO_STAGES and beside and beside.in_4_bits and request.zero_backend == "deepspeed":
        return "DeepSpeed casts weights, which 4-bit ones do not survive; --backend native does not"
    if strategy in words.FSDP_STRATEGIES and request.facts.kind == "vision-text":
        return "torch's FSDP2 cannot shard the scalar logit_scale"
    is_chosen = request.shard is not None or (request.degrees is not None and request.degrees.shard is not None)
    if strategy == "hsdp" and not is_chosen and (cluster.nodes == 1 or cluster.gpus_per_node == 1):
        return "is fsdp unless there are several nodes of several GPUs"
    return None


def enumerate_candidates(request: Request) -> Iterator[CandidateLayout]:
    """Yield every layout of every applicable strategy.

    Of those that split the model it is what `dsplan run` can run, or all of them where the request allows it.
    """
    for strategy in words.STRATEGIES:
        if why_inapplicable(request, strategy):
            continue
        for layout in _layouts(request, strategy):
            # What splits nothing is made of what goes together, unless somebody decided it.
            checked = request.degrees is not None or (layout.splits_model and not request.allow_unrunnable)
            if not (checked and why_unfit(request, layout)):
                yield layout


def why_unfit_degrees(request: Request) -> str | None:
    """Return why no plan has the degrees that somebody decided; None where one has them.

    The words are of the strategy that people split models with most.
    """
    reasons = [
        why_unfit(request, layout)
        for strategy in sorted(words.STRATEGIES, key=lambda name: name not in MODEL_PARALLEL_STRATEGIES)
        if not why_inapplicable(request, strategy)
        for layout in _layouts(request, strategy)
    ]
    if not reasons and request.strategies is not None and len(request.strategies) == 1:
        (strategy,) = request.strategies
        return f"{strategy} {why_inapplicable(request, strategy)}; choose another strategy"
    return None if None in reasons else next(iter(reasons), "needs more ranks")


def why_unfit(request: Request, layout: CandidateLayout) -> str | None:
    """Return why a layout does not go together or does not divide the model; None where `dsplan run` can run it."""
    sharing = layout.tp * layout.pp * layout.cp
    if layout.data_parallel * sharing != request.cluster.gpus:
        return f"{sharing} ranks that share samples cannot be spread so over {request.cluster.gpus} GPUs"
    for micro_batch in micro_batches(request, layout)[:1]:
        try:
            configuration = configuration_of(request, layout, micro_batch)
        except ContradictoryRequest as problem:  # experts over more ranks than there are
            return why_no_experts(request.facts, layout.ep) or str(problem)
        return why_refused(configuration, adapted_of(request.workload)) or why_indivisible(request, configuration)
    batch = request.workload.global_batch_size
    return f"global batch {batch} cannot be split over {layout.data_parallel} data-parallel ranks"


def _layouts(request: Request, strategy: words.Strategy) -> Iterator[CandidateLayout]:
    """Every layout of a strategy."""
    backend = words.default_backend(strategy, zero=request.zero_backend)
    if not compresses(strategy, backend, request.gradient_compression):
        return
    for tp, pp, cp in _model_parallel_degrees(request, strategy):
        for ep in _expert_degrees(request, strategy, tp=tp, pp=pp, cp=cp):
            yield from _with_memory_savers(request, strategy, _Split(tp=tp, pp=pp, cp=cp, ep=ep))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """Degrees over which ranks share the work on one sample."""

    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def is_whole(self) -> bool:
        return self.tp * self.pp * self.cp * self.ep == 1


def _with_memory_savers(request: Request, strategy: words.Strategy, split: _Split) -> Iterator[CandidateLayout]:
    is_sequence_parallel = _sequence_parallel(request, split)
    backend = words.default_backend(strategy, zero=request.zero_backend)
    code = code_base(request.workload.code)
    spreads = tuple(_shards(request, strategy, split))
    offloads: tuple[words.Offload, ...] = ("none", *(offloads_of(strategy, backend) if split.is_whole else ()))
    for offload in offloads:
        if offload not in code.offloads:
            continue
        if not _is_considered(request, strategy, offload, is_sharded=any(shard > 1 for _, shard in spreads)):
            continue
        syncs = (True, False) if strategy in words.FSDP_STRATEGIES and split.is_whole else (True,)
        ratios = _ratios(request, backend, offload)
        checkpointings = request.checkpointings or code.checkpointings
        pipelines = _pipelines(request, split.pp)
        for (replicate, shard), checkpointing, sync, ratio, (schedule, pieces) in product(
            spreads, checkpointings, syncs, ratios, pipelines
        ):
            yield CandidateLayout(
                strategy=strategy,
                dp_replicate=replicate,
                dp_shard=shard,
                tp=split.tp,
                pp=split.pp,
                cp=split.cp,
                ep=split.ep,
                pp_schedule=schedule,
                virtual_stages=pieces,
                sequence_parallel=is_sequence_parallel,
                checkpointing=checkpointing,
                offload=offload,
                offload_ratio=ratio,
                sync_each_micro_batch=sync,
            )


def _sequence_parallel(request: Request, split: _Split) -> bool:
    """Return whether tp ranks split the sequence between their products.

    They do as asked, else where the code does, and where experts are spread over them, which takes it.
    """
    requested = None if request.degrees is None else request.degrees.sequence_parallel
    if requested is not None:
        return requested
    return split.tp > 1 and (split.ep > 1 or code_base(request.workload.code).sequence_parallel)


def _is_considered(request: Request, strategy: words.Strategy, offload: words.Offload, *, is_sharded: bool) -> bool:
    """Return whether an offload makes sense on the cluster; one that was asked for by name always does."""
    if request.offload is not None:
        return offload == request.offload
    if offload != "none" and request.workload.optimizer == "muon":
        return False
    if offload in ("optimizer", "nvme") and request.workload.method != "full":
        return False  # adapters have hardly any states to move
    if offload == "none":
        # One GPU has nothing to shard: ZeRO and FSDP help there only by offload.
        return is_sharded or request.cluster.gpus > 1 or strategy == "single"
    return not request.cluster.device.is_cpu and (offload != "nvme" or request.cluster.nvme_bytes_per_node > 0)


def _ratios(request: Request, backend: words.Backend, offload: words.Offload) -> tuple[float, ...]:
    if request.offload_ratio is not None and offload != "none":
        return (request.offload_ratio,)
    return OFFLOAD_RATIOS if (backend, offload) == ("native", "optimizer") else (1.0,)


def default_shards(request: Request, strategy: words.Strategy, ranks: int) -> tuple[int, int]:
    """Return dp_replicate and dp_shard of a strategy over `ranks` data-parallel ranks where nobody chose them."""
    if strategy in ("single", "ddp"):
        return ranks, 1
    if strategy == "hsdp":
        return request.cluster.nodes, ranks // request.cluster.nodes
    return 1, ranks


def shard_over(strategy: words.Strategy, ranks: int, *, shard: int, cp: int = 1) -> tuple[int, int]:
    """Return dp_replicate and dp_shard of `ranks` data-parallel ranks where `shard` ranks share one set of states.

    The `cp` ranks of one sample are among those that share, so that dp_shard is shard / cp.

    Raises:
        ContradictoryRequest: the strategy shards nothing, or `shard` does not divide the ranks.
    """
    if strategy in ("single", "ddp"):
        if shard > 1:
            raise ContradictoryRequest(f"{strategy} shards nothing, and shard is {shard}; use zero1-3, fsdp or hsdp")
        return ranks, 1
    if shard % cp or ranks % max(shard // cp, 1):
        possible = ", ".join(str(cp * size) for size in divisors(ranks) if cp * size > 1)
        samples = f" x cp {cp}" if cp > 1 else ""
        raise ContradictoryRequest(
            f"shard {shard} does not divide {ranks} data-parallel ranks{samples}; use {possible or 'more ranks'}"
        )
    if shard == 1 and ranks > 1:
        raise ContradictoryRequest(f"{strategy} with shard 1 keeps whole states on every rank; use ddp, or shard 2")
    return ranks * cp // shard, shard // cp


def _shards(request: Request, strategy: words.Strategy, split: _Split) -> Iterator[tuple[int, int]]:
    """Yield the dp_replicate and dp_shard that the search weighs for a strategy.

    They are what the strategy says, and over several nodes replicas of the fewest ranks that can hold the states: those
    of a node, or twice as many until they fit, where experts divide over them. Fewer do not fit, and more send more
    between nodes.
    """
    ranks = request.cluster.gpus // (split.tp * split.pp * split.cp)
    if request.degrees is not None and request.degrees.shard is not None:
        if strategy not in ("single", "ddp"):
            yield shard_over(strategy, ranks, shard=request.degrees.shard, cp=split.cp)
        return
    if request.shard is not None:
        yield from _shards_as_asked(request, strategy, ranks, cp=split.cp, shard=request.shard)
        return
    usual = default_shards(request, strategy, ranks)
    yield usual
    if request.cluster.nodes > 1 and _copies_shards(request, strategy):
        size = _fewest_shards(request, strategy, split, ranks)
        spreads_experts = size * split.cp * split.tp % split.ep == 0
        if 1 < size < ranks and size != usual[1] and spreads_experts:
            yield ranks // size, size


def _shards_as_asked(
    request: Request, strategy: words.Strategy, ranks: int, *, cp: int, shard: int
) -> Iterator[tuple[int, int]]:
    """Yield dp_replicate and dp_shard where so many ranks share one set of states; none where they cannot.

    Copies of FSDP's shards are hsdp, and ZeRO's are our own ZeRO's or what the code base has.
    """
    if strategy in words.REPLICAS or shard % cp or ranks % max(shard // cp, 1):
        return
    code, has_copies = code_base(request.workload.code), shard < ranks * cp
    if strategy in ("fsdp", "hsdp"):
        can = has_copies == (strategy == "hsdp")
    elif strategy in words.ZERO_STAGES:
        can = not has_copies or code.runs_here or (code.copies_shards and strategy == "zero1")
    else:
        can = True
    if can:
        yield ranks * cp // shard, shard // cp


def _copies_shards(request: Request, strategy: words.Strategy) -> bool:
    """Return whether a strategy can have several copies of its shards: ZeRO as its code does, or our own as it runs."""
    if strategy not in words.ZERO_STAGES:
        return strategy == "hsdp"
    code = code_base(request.workload.code)
    return request.zero_backend == "native" if code.runs_here else code.copies_shards and strategy == "zero1"


def _fewest_shards(request: Request, strategy: words.Strategy, split: _Split, ranks: int) -> int:
    """Return the fewest data-parallel ranks, of whole nodes, over which the states of a model fit; 0 without any.

    They are 16 bytes a parameter in mixed precision, of which stage 1 keeps 4 and stage 2 keeps 2 whole on every rank
    (ZeRO, arXiv 1910.02054, sections 3.1 and 5).
    """
    cluster = request.cluster
    parameters = request.counts.trained.total / (split.tp * split.pp)
    whole = {"zero1": 4, "zero2": 2}.get(strategy, 0)
    room = device_limit(request.workload, cluster) - whole * parameters
    size = cluster.gpus_per_node // (split.tp * split.cp)
    while 0 < size < ranks and (BYTES_PER_PARAMETER - whole) * parameters > room * size * split.cp:
        size *= 2
    return size if size and ranks % size == 0 else 0


def _model_parallel_degrees(request: Request, strategy: words.Strategy) -> Iterator[tuple[int, int, int]]:
    """Yield (tp, pp, cp): tp in a node and dividing heads, pp up to the depth, cp for long samples."""
    if request.degrees is not None:
        yield request.degrees.tp, request.degrees.pp, request.degrees.cp
        return
    yield 1, 1, 1
    facts, cluster, splits = request.facts, request.cluster, _splits(request, strategy)
    deepest = min(facts.num_layers, LARGEST_PIPELINE) if "pp" in splits else 1
    for tp in _powers_of_two(cluster.gpus_per_node if "tp" in splits else 1):
        if heads_left_over(facts, tp) or facts.num_kv_heads % min(tp, facts.num_kv_heads):
            continue
        if code_base(request.workload.code).key_heads == "divided" and facts.num_kv_heads % tp:
            continue
        for pp in _pipeline_degrees(cluster.gpus // tp, deepest):
            for cp in _context_degrees(request, cluster.gpus // (tp * pp), splits):
                if tp * pp * cp > 1 and cluster.gpus % (tp * pp * cp) == 0:
                    yield tp, pp, cp


def _pipeline_degrees(ranks: int, deepest: int) -> tuple[int, ...]:
    """Return powers of two; of ranks that are a multiple of three also three times those, which leave whole batches."""
    powers = _powers_of_two(min(ranks, deepest))
    return tuple(sorted({*powers, *(3 * power for power in powers if ranks % 3 == 0 and 3 * power <= deepest)}))


def _splits(request: Request, strategy: words.Strategy) -> tuple[words.Degree, ...]:
    """Return the degrees that the search may choose for a strategy.

    They are those of its code, of models whose layers are known, on GPUs; or those of them that a live script can be
    run with.
    """
    code, facts, by_script = code_base(request.workload.code), request.facts, request.splits
    was_asked = by_script is not None and request.strategies == (strategy,)
    if strategy in code.whole_strategies or not (was_asked or strategy in MODEL_PARALLEL_STRATEGIES):
        return ()
    if by_script is not None:
        return tuple(name for name in code.degrees if name in by_script)
    is_known = facts.kind in ("decoder", "encoder") and not facts.recorded_as
    return code.degrees if is_known and not request.cluster.device.is_cpu else ()


def _context_degrees(request: Request, ranks: int, splits: tuple[words.Degree, ...]) -> tuple[int, ...]:
    """Over how many ranks a sample's tokens are spread."""
    length, facts = request.workload.sequence_length, request.facts
    if length < LONG_SEQUENCE or facts.kind != "decoder" or facts.runs_eager(request.workload.attention):
        return (1,)
    if "cp" not in splits:
        return (1,)
    most = min(ranks, length // TOKENS_PER_RANK)
    return tuple(cp for cp in _powers_of_two(most) if cp == 1 or length % (2 * cp) == 0)


def _expert_degrees(request: Request, strategy: words.Strategy, *, tp: int, pp: int, cp: int) -> tuple[int, ...]:
    """Return over how many ranks experts may be spread: powers of two that divide both.

    They are those of a node at the least, whose links are the fastest; and none with tp where the code splits no
    sequence between its products.
    """
    if request.degrees is not None:
        return (request.degrees.ep,)
    facts, cluster = request.facts, request.cluster
    if "ep" not in _splits(request, strategy) or not facts.is_moe or facts.kind != "decoder" or facts.recorded_as:
        return (1,)
    if tp > 1 and not code_base(request.workload.code).sequence_parallel:
        return (1,)
    spreads = _shards(request, strategy, _Split(tp=tp, pp=pp, cp=cp, ep=1))
    ranks = next((shard for _, shard in spreads), 1) * cp * tp
    degrees = _powers_of_two(min(ranks, facts.num_experts))
    possible = [ep for ep in degrees if facts.num_experts % ep == 0 and ranks % ep == 0]
    least = min(cluster.gpus_per_node, possible[-1])
    return (1, *(ep for ep in possible if ep >= max(least, 2)))


def _pipelines(request: Request, pp: int) -> tuple[tuple[words.Schedule, int], ...]:
    """Schedules with their virtual stages, each with a block of its own, but that of the embedding or the head.

    Llama 3 405B has 126 blocks in 128 of them (arXiv 2407.21783, section 3.3.2). A pipeline inside one node is short
    enough without any.
    """
    usual: tuple[words.Schedule, int] = ("1f1b", 1)
    if request.degrees is not None:
        return (_asked_pipeline(request.degrees),)
    one_forward = "interleaved" not in code_base(request.workload.code).schedules
    if pp == 1 or request.cluster.nodes == 1 or one_forward:
        return (usual,)
    deepest = -(-request.facts.num_layers // pp)
    most = min((request.facts.num_layers + 2) // pp, MOST_VIRTUAL_STAGES)
    pieces = [count for count in _powers_of_two(most) if count > 1]
    divisors = [count for count in pieces if deepest % count == 0]
    interleaved: list[tuple[words.Schedule, int]] = [
        ("interleaved", count) for count in {*divisors[:1], *divisors[-1:]}
    ]
    zero_bubble: list[tuple[words.Schedule, int]] = (
        [("zero-bubble", 1)] if request.workload.code == "torchtitan" else []
    )
    return (usual, *interleaved, *zero_bubble)


def _asked_pipeline(degrees: Degrees) -> tuple[words.Schedule, int]:
    """Return a schedule and its virtual stages, of which either says what the other is."""
    schedule, pieces = degrees.pp_schedule, degrees.virtual_stages
    if schedule is None:
        schedule = "1f1b" if pieces in (None, 1) else "interleaved"
    return schedule, pieces or (2 if schedule == "interleaved" else 1)


def micro_batches(request: Request, layout: CandidateLayout) -> tuple[int, ...]:
    """Return the micro-batches that keep the global batch whole, smallest first; none where it cannot be split.

    A layout that reduces once per step is one of its own only where several micro-batches make up a step.
    """
    batch, ranks = request.workload.global_batch_size, layout.data_parallel
    sizes = divisors(batch // ranks) if batch % ranks == 0 else ()
    if not layout.sync_each_micro_batch:
        sizes = sizes[:-1]
    if layout.pp_schedule == "interleaved":
        # Megatron-LM runs rounds of as many micro-batches as there are stages.
        sizes = tuple(size for size in sizes if batch // (ranks * size) % layout.pp == 0)
    return sizes if request.micro_batch is None else tuple(size for size in sizes if size == request.micro_batch)


def configuration_of(request: Request, layout: CandidateLayout, micro_batch: int) -> Configuration:
    """Return the configuration of a layout with one of its micro-batches."""
    workload = request.workload
    backend = request.backend_of(layout.strategy, needs_native=layout.splits_model or layout.dp_replicate > 1)
    zero_plus = request.zero_plus if (layout.strategy, backend) == ("zero3", "deepspeed") else None
    return Configuration(
        strategy=layout.strategy,
        backend=backend,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        pp_schedule=layout.pp_schedule,
        virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel,
        checkpoint_every=layout.checkpoint_every,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=workload.global_batch_size // (layout.data_parallel * micro_batch),
        global_batch_size=workload.global_batch_size,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
        optimizer=workload.optimizer,
        attention=workload.attention,
        activation_checkpointing=layout.checkpointing,
        offload=layout.offload,
        offload_ratio=layout.offload_ratio,
        gradient_compression=request.gradient_compression,
        activations_on_host=request.activations_on_host and layout.checkpointing != "none",
        sync_each_micro_batch=layout.sync_each_micro_batch,
        **({} if zero_plus is None else asdict(zero_plus)),
    )


def _powers_of_two(largest: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(largest.bit_length()) if 1 << power <= largest)


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a number in ascending order: the micro-batches that keep the global batch whole."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(small + [number // value for value in reversed(small) if value * value != number])
