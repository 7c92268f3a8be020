"""The step: compute, communication, offload, optimizer and pipeline bubble put together.

`step_seconds = compute + exposed_communication + offload + optimizer + bubble`. Where the stages of a pipeline are
unlike it is that of the stage whose own parts and waiting take longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware_db.records import dataclass
from planner.cost.timing.data_parallel import Communication, data_parallel
from planner.cost.timing.efficiency import DeviceRates, compute_dtype, rates_of
from planner.cost.timing.flops import model_flops
from planner.cost.timing.layout import Layout, layout, slowest_share
from planner.cost.timing.offload import OffloadCost, offload_cost
from planner.cost.timing.optimizer import optimizer_seconds
from planner.cost.timing.parameter_copies import copies_of, copy_seconds
from planner.cost.timing.pipeline import (
    Exchanges,
    Stage,
    boundary_seconds,
    bubble_seconds,
    exchanges,
    stages,
)
from planner.types.job import Job
from planner.types.plan import StepTime, Throughput


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts that a step is put together from.

    The stage that decides (the busiest, or the last to end where stages are unlike), what its ranks exchange inside a
    micro-batch, the seconds of copies that `time` counts as compute, those of waiting for the slowest GPU that it
    counts as communication, and the sums.
    """

    where: Layout
    rates: DeviceRates
    busiest: Stage
    inside: Exchanges
    copies: float
    waiting: float
    time: StepTime


def parts_of(job: Job) -> Parts:
    """Return the optimizer step and what it is put together from, without the rest of a round of post-training."""
    if job.configuration.stage_layers:
        return slowest_stage([replace(job, stage=stage) for stage in range(job.configuration.pp)])
    rates = rates_of(job)
    where = layout(job)
    pipeline = stages(job, rates)
    busiest = max(pipeline, key=lambda stage: stage.total)
    inside = exchanges(job, where, busiest, rates)
    waits = bubble_seconds(job, pipeline, [inside] * len(pipeline), boundary_seconds(job, rates))
    return _parts(job, busiest, inside, waits)


def parts_of_stages(jobs: Sequence[Job]) -> tuple[Parts, ...]:
    """Return what each stage of a pipeline makes of a step, stages being unlike in blocks or in devices.

    `jobs` are the stages in order: each is the job as if all devices were like that stage's.
    """
    pipeline, inside = zip(*map(stage_of, jobs), strict=True)
    steps = jobs[0].configuration.gradient_accumulation_steps
    busy = [steps * (stage.total + own.visible) for stage, own in zip(pipeline, inside, strict=True)]
    hop = max(boundary_seconds(job, rates_of(job)) for job in jobs)
    whole = max(busy) + bubble_seconds(jobs[0], pipeline, inside, hop)
    return tuple(
        _parts(job, stage, own, whole - seconds)
        for job, stage, own, seconds in zip(jobs, pipeline, inside, busy, strict=True)
    )


def stage_of(job: Job) -> tuple[Stage, Exchanges]:
    """Return a micro-batch's work on the stage that the job looks at, and what its ranks exchange inside it."""
    rates = rates_of(job)
    stage = stages(job, rates)[job.stage]
    return stage, exchanges(job, layout(job), stage, rates)


def slowest_stage(jobs: Sequence[Job]) -> Parts:
    """Return the parts of the stage that ends its step last, of `parts_of_stages`."""
    return max(parts_of_stages(jobs), key=lambda parts: parts.time.step_seconds)


def _parts(job: Job, busiest: Stage, inside: Exchanges, bubble: float) -> Parts:
    """Return the parts of a step whose ranks compute one stage, and wait `bubble` seconds for others."""
    steps = job.configuration.gradient_accumulation_steps
    rates = rates_of(job)
    where = layout(job)
    hop = boundary_seconds(job, rates)
    hops = 2 * hop * job.configuration.virtual_stages
    visible = Communication(total=steps * (inside.total + hops), exposed=steps * inside.visible)
    sharded = data_parallel(job, where, busiest, rates)
    communication = sharded + visible
    hideout = max(0.0, steps * busiest.total - (sharded.total - sharded.exposed))
    offload = offload_cost(job, where, hideout, rates)
    copies = copy_seconds(copies_of(job, where, rates), rates)
    compute = steps * busiest.total + copies
    waiting = compute * slowest_share(job.configuration.world_size)
    communication += Communication(total=waiting, exposed=waiting)
    optimizer = _optimizer(job, where, rates, offload)
    time = StepTime(
        step_seconds=compute + communication.exposed + offload.transfers + optimizer + bubble,
        compute_seconds=compute,
        communication_seconds=communication.total,
        exposed_communication_seconds=communication.exposed,
        offload_seconds=offload.transfers,
        optimizer_seconds=optimizer,
        bubble_seconds=bubble,
    )
    return Parts(where=where, rates=rates, busiest=busiest, inside=inside, copies=copies, waiting=waiting, time=time)


def _optimizer(job: Job, where: Layout, rates: DeviceRates, offload: OffloadCost) -> float:
    """Return the step on the device, on the host, or on both at once, each with its share."""
    if not offload.cpu_optimizer:
        return optimizer_seconds(job, where, rates)
    kept = 1 - job.configuration.offload_ratio
    on_device = kept * optimizer_seconds(job, where, rates) if kept else 0.0
    return on_device + offload.cpu_optimizer if rates.serial else max(on_device, offload.cpu_optimizer)


def _at_mean_length(job: Job) -> Job:
    """Return the job with samples of the mean length that was stated for them."""
    post = job.workload.post
    if post is None or post.completion_length == post.completion_max:
        return job
    mean = replace(job.configuration, sequence_length=post.mean_tokens)
    return replace(job, configuration=mean, workload=replace(job.workload, sequence_length=post.mean_tokens))


def throughput(job: Job, time: StepTime) -> Throughput:
    """Rates of a step. `mfu` counts model operations (see `flops`) against the dense peak of the compute dtype.

    Of post-training they are rates of tokens that are no padding, over GPUs that generate too.
    """
    job, apart = _at_mean_length(job), 0
    if job.workload.generates and job.workload.post is not None:
        apart = job.workload.post.rollout_gpus
    configuration = job.configuration
    gpus, samples = configuration.world_size + apart, configuration.global_batch_size
    micro_batches = samples / configuration.micro_batch_size
    flops = model_flops(job) * micro_batches / time.step_seconds / gpus
    peak = job.cluster.device.peak_flops(compute_dtype(job.cluster.device, configuration.precision))
    tokens = samples * job.workload.sequences_per_sample * configuration.sequence_length
    return Throughput(
        tokens_per_second_per_gpu=tokens / time.step_seconds / gpus,
        samples_per_second=samples / time.step_seconds,
        tflops_per_gpu=flops / 1e12,
        mfu=flops / peak if peak else None,
    )
