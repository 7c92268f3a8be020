"""The exact configuration of `dsplan estimate`, from its flags."""

from __future__ import annotations

from dataclasses import replace

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.cost.code_bases import code_base
from planner.errors import ContradictoryRequest
from planner.search.post_training import with_rounds
from planner.search.request import Request
from planner.search.space import default_shards, shard_over
from planner.types.plan import Configuration
from planner.types.post_training import PostTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactOptions:
    """The user's wishes for one configuration; a field is None if the user did not say.

    `global_batch` is None if the request's global batch is a default, which then follows from the other two numbers,
    and `prompts_per_step` if that of a round of generation is. `steps_per_generation` are micro-batches.
    """

    strategy: words.Strategy | None = None
    backend: words.Backend | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    global_batch: int | None = None
    prompts_per_step: int | None = None
    steps_per_generation: int | None = None
    checkpointing: words.Checkpointing = "none"
    offload: words.Offload = "none"
    offload_ratio: float = 1.0
    gradient_compression: words.Compression = "none"
    activations_on_host: bool = False
    hpz: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    shard: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool | None = None
    pp_schedule: words.Schedule = "1f1b"
    virtual_stages: int = 1
    checkpoint_every: int = 1
    recompute_modules: str | None = None


def exact(request: Request, options: ExactOptions) -> tuple[Request, Configuration]:
    """Return the configuration, and the request with the global batch that it has.

    Without a strategy it is `single` on one GPU and `ddp` on several; without a micro-batch, one sample.

    Raises:
        ContradictoryRequest: the degrees do not divide the GPUs, or no whole micro-batch or accumulation gives the
            global batch.
    """
    strategy: words.Strategy = options.strategy or ("single" if request.cluster.gpus == 1 else "ddp")
    replicate, shard = _degrees(request, strategy, options)
    post = request.workload.post if request.workload.generates else None
    if post is not None and options.prompts_per_step and not (options.global_batch or options.grad_accum):
        options = replace(options, global_batch=post.samples)
    micro, accumulation = _batch(options, replicate * shard)
    batch = micro * accumulation * replicate * shard
    splits = options.tp * options.pp * options.cp * options.ep > 1
    needs_native = splits or replicate > 1
    workload = replace(request.workload, global_batch_size=batch, post=_rounds(request, options, batch, accumulation))
    if options.checkpoint_every > max(request.facts.num_layers, 1):
        raise ContradictoryRequest(
            f"--checkpoint-every {options.checkpoint_every} is more than the model's {request.facts.num_layers} blocks;"
            " use fewer"
        )
    configuration = Configuration(
        strategy=strategy,
        backend=options.backend or request.backend_of(strategy, needs_native=needs_native),
        dp_replicate=replicate,
        dp_shard=shard,
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        ep=options.ep,
        pp_schedule=options.pp_schedule,
        virtual_stages=options.virtual_stages,
        sequence_parallel=_splits_sequence(request, options),
        checkpoint_every=options.checkpoint_every,
        recompute_modules=options.recompute_modules or "",
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        global_batch_size=batch,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
        optimizer=workload.optimizer,
        attention=workload.attention,
        activation_checkpointing=options.checkpointing,
        offload=options.offload,
        offload_ratio=options.offload_ratio,
        gradient_compression=options.gradient_compression,
        activations_on_host=options.activations_on_host,
        hpz_partition_size=options.hpz,
        quantized_weights=options.quantized_weights,
        quantized_gradients=options.quantized_gradients,
    )
    # A default that the configuration overrides was not taken for granted after all.
    defaults = tuple(text for text in request.defaults if options.global_batch or "--global-batch" not in text)
    if options.micro_batch is None and not options.grad_accum:
        defaults = (*defaults, f"micro-batch {micro} (--micro-batch; recommend looks for the best)")
    return replace(request, workload=workload, defaults=defaults), configuration


def _rounds(request: Request, options: ExactOptions, batch: int, accumulation: int) -> PostTraining | None:
    """Return what a round of post-training generates, by the micro-batches that train on it.

    Raises:
        ContradictoryRequest: `steps_per_generation` is given where nothing is generated, or the numbers contradict.
    """
    post = request.workload.post
    if post is None or not request.workload.generates:
        if options.steps_per_generation is not None:
            raise ContradictoryRequest(f"--steps-per-generation is for --task {' or '.join(words.GENERATING)}")
        return post if post is None else replace(post, prompts_per_step=batch)
    return with_rounds(
        post,
        batch=batch,
        samples_per_micro_step=batch // accumulation,
        steps_per_generation=options.steps_per_generation,
        is_given=options.prompts_per_step is not None,
    )


def _splits_sequence(request: Request, options: ExactOptions) -> bool:
    """Return whether tp ranks split sequences: as asked, else where the code does it unless told otherwise."""
    if options.sequence_parallel is not None:
        return options.sequence_parallel
    return options.tp > 1 and code_base(request.workload.code).sequence_parallel


def _degrees(request: Request, strategy: words.Strategy, options: ExactOptions) -> tuple[int, int]:
    """dp_replicate and dp_shard of the GPUs that tp and pp leave."""
    cluster, split = request.cluster, options.tp * options.pp * options.cp
    if cluster.gpus % split:
        cp = f" x --cp {options.cp}" if options.cp > 1 else ""
        raise ContradictoryRequest(
            f"--tp {options.tp} x --pp {options.pp}{cp} = {split} does not divide {cluster.gpus} GPUs;"
            " change one of them"
        )
    ranks = cluster.gpus // split
    if options.shard is not None:
        return shard_over(strategy, ranks, shard=options.shard, cp=options.cp)
    if strategy == "hsdp" and (cluster.nodes == 1 or ranks % cluster.nodes):
        raise ContradictoryRequest(
            f"hsdp copies the model over nodes, and {ranks} data-parallel ranks do not spread over {cluster.nodes}"
            f" node{'s' if cluster.nodes > 1 else ''}; give --shard, or --nodes, or use --strategy fsdp"
        )
    return default_shards(request, strategy, ranks)


def _batch(options: ExactOptions, ranks: int) -> tuple[int, int]:
    """Micro-batch and accumulation; what was not said follows from the global batch."""
    if options.global_batch is None:
        return options.micro_batch or 1, options.grad_accum or 1
    if options.micro_batch and options.grad_accum:
        return options.micro_batch, _checked(options, options.micro_batch * ranks, options.grad_accum)
    divisor = options.micro_batch or options.grad_accum or 1
    other = _checked(options, divisor * ranks, None)
    return (other, divisor) if options.grad_accum else (divisor, other)


def _checked(options: ExactOptions, per_step: int, wanted: int | None) -> int:
    """`global_batch` over `per_step`, which must be whole and, where it was asked for, `wanted`."""
    batch = options.global_batch or per_step
    if batch % per_step == 0 and wanted in (None, batch // per_step):
        return batch // per_step
    if wanted is not None:
        raise ContradictoryRequest(
            f"--global-batch {batch} is not --micro-batch {options.micro_batch} x --grad-accum {wanted} x"
            f" {per_step // (options.micro_batch or 1)} data-parallel ranks = {per_step * wanted}; leave one out"
        )
    lower = batch // per_step * per_step
    near = f"{lower} or {lower + per_step}" if lower else str(per_step)
    raise ContradictoryRequest(f"--global-batch {batch} is not a multiple of {per_step}; the nearest that is: {near}")
