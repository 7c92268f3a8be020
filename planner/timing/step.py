"""The step: compute, communication, offload, optimizer and pipeline bubble put together.

`step_seconds = compute + exposed_communication + offload + optimizer + bubble`.
"""

from __future__ import annotations

from planner.job import Job
from planner.plan import StepTime, Throughput
from planner.timing.compute import Passes, block_passes, head_passes
from planner.timing.data_parallel import Communication, data_parallel
from planner.timing.efficiency import DeviceRates, device_rates
from planner.timing.flops import executed_layers, geometry, job_stacks, model_flops
from planner.timing.implementation import TRANSFORMERS, Implementation
from planner.timing.layout import Layout, layout
from planner.timing.model_parallel import boundary_seconds, tensor_parallel_seconds
from planner.timing.offload import offload_cost
from planner.timing.optimizer import optimizer_seconds, parameter_traffic_seconds


def step_time(job: Job, code: Implementation = TRANSFORMERS) -> StepTime:
    """Seconds of one optimizer step in the steady state, on the busiest rank.

    `code` says whose modules run; other implementations than transformers' serve to check the model against what others
    measured.
    """
    configuration = job.configuration
    steps = configuration.gradient_accumulation_steps
    rates = device_rates(job.cluster, configuration.precision, code)
    where = layout(job)
    whole, stage = _stage_passes(job, where, rates)
    reductions = tensor_parallel_seconds(job, where, rates)
    boundary = boundary_seconds(job, rates)
    always_visible = steps * (reductions + 2 * boundary)
    communication = data_parallel(job, where, stage, code) + Communication(total=always_visible, exposed=always_visible)
    offload = offload_cost(job, where, stage)
    compute = steps * stage.total + parameter_traffic_seconds(job, where, rates)
    optimizer = offload.cpu_optimizer or optimizer_seconds(job, where, rates)
    # The first micro-batch has to pass through all other stages and its gradient back again.
    bubble = whole.total - stage.total + (configuration.pp - 1) * (reductions + 2 * boundary)
    return StepTime(
        step_seconds=compute + communication.exposed + offload.transfers + optimizer + bubble,
        compute_seconds=compute,
        communication_seconds=communication.total,
        exposed_communication_seconds=communication.exposed,
        offload_seconds=offload.transfers,
        optimizer_seconds=optimizer,
        bubble_seconds=bubble,
    )


def _stage_passes(job: Job, where: Layout, rates: DeviceRates) -> tuple[Passes, Passes]:
    """One micro-batch through the whole model, and through the stage that takes longest."""
    shape = geometry(job)
    blocks = Passes(forward=0.0, backward=0.0)
    for stack in job_stacks(job):
        blocks = blocks + block_passes(stack, job, shape, rates) * stack.layers
    head = head_passes(job, shape, rates)
    if job.configuration.pp == 1:
        return blocks + head, blocks + head
    layers = executed_layers(job)
    last = blocks * (layers // job.configuration.pp / layers) + head
    fullest = blocks * where.share_of_layers
    return blocks + head, max(last, fullest, key=lambda passes: passes.total)


def throughput(job: Job, time: StepTime) -> Throughput:
    """Rates of a step. `mfu` counts model operations (see `flops`) against the dense peak of the compute dtype."""
    configuration = job.configuration
    samples = configuration.global_batch_size
    micro_batches = samples / configuration.micro_batch_size
    flops = model_flops(job) * micro_batches / time.step_seconds / configuration.world_size
    peak = device_rates(job.cluster, configuration.precision).peak_flops
    tokens = samples * configuration.sequence_length
    return Throughput(
        tokens_per_second_per_gpu=tokens / time.step_seconds / configuration.world_size,
        samples_per_second=samples / time.step_seconds,
        tflops_per_gpu=flops / 1e12,
        mfu=flops / peak if peak else None,
    )
