"""Estimate: one exact configuration, priced and judged."""

from __future__ import annotations

from dataclasses import dataclass

from hardware_db.units import GB, format_bytes
from planner import vocabulary as words
from planner.calibration.experience import NO_EXPERIENCE, Experience
from planner.cost.memory import memory_estimate
from planner.cost.memory.host import loads_once
from planner.cost.memory.load import MADE_BYTES
from planner.cost.memory.overhead import NEAREST_FORM_ERROR, differs
from planner.cost.memory.states import states_of
from planner.cost.precision import recipe_of
from planner.cost.timing import step_time, throughput
from planner.cost.verdict import Judgement, judge, limited_by
from planner.errors import ContradictoryRequest
from planner.search.request import WITHOUT_DEEPSPEED, Request, deepspeed_lacks
from planner.types.job import Job, described, provenance
from planner.types.plan import Configuration, MemoryEstimate, Plan, StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A job with its memory and whether that fits; `memory_source` is where the memory comes from, `notes` what there
    is to say of it, `experience` what was measured before."""

    job: Job
    memory: MemoryEstimate
    judgement: Judgement
    memory_source: words.Provenance = "datasheet"
    notes: tuple[str, ...] = ()
    experience: Experience = NO_EXPERIENCE


def job_of(request: Request, configuration: Configuration) -> Job:
    """The request's work in one configuration."""
    return Job(
        facts=request.facts,
        counts=request.counts,
        workload=request.workload,
        cluster=request.cluster,
        configuration=configuration,
    )


def price(request: Request, configuration: Configuration) -> Priced:
    """Memory and verdict of a configuration; time is left to `plan_of`, since most candidates never need it."""
    job = job_of(request, configuration)
    memory = memory_estimate(job)
    experience = request.experience
    return Priced(
        job=job,
        memory=memory,
        judgement=judged(job, memory, experience),
        memory_source="traced" if job.facts.traced else "datasheet",
        experience=experience,
    )


def timed(priced: Priced) -> StepTime:
    """What the job takes: as measured where this machine ran it before, as expected from runs like it elsewhere."""
    run = priced.experience.known.get(priced.job.configuration)
    return priced.experience.expected(priced.job) if run is None else run.answer(step_time(priced.job))


def resident_bytes(job: Job) -> float:
    """Weights, gradients and optimizer states on the device, all there when a backward pass ends."""
    states = states_of(job, recipe_of(job))
    return states.parameters + states.gradients + states.optimizer


def judged(job: Job, memory: MemoryEstimate, experience: Experience) -> Judgement:
    """Whether a job with this memory fits: by what there is, and by what ran out of memory before."""
    judgement = judge(job, memory, _nvme_bytes(job))
    oom_record = None if judgement.verdict == "does_not_fit" else experience.oom_record(job, memory)
    return judgement if oom_record is None else oom_record.judgement(memory)


def _nvme_bytes(job: Job) -> float:
    """What one node keeps on its disks."""
    if job.configuration.offload != "nvme":
        return 0.0
    return states_of(job, recipe_of(job)).nvme * job.cluster.gpus_per_node


def estimate(request: Request, configuration: Configuration) -> Plan:
    """The plan of one configuration on the request's cluster.

    Raises:
        ContradictoryRequest: as `possible`.
    """
    priced = possible(request, configuration)
    return plan_of(priced, timed(priced))


def possible(request: Request, configuration: Configuration) -> Priced:
    """The price of a configuration that somebody asked for by name.

    Raises:
        ContradictoryRequest: the configuration's degrees do not use exactly the cluster's devices, or a degree does not
            divide what it splits, or the strategy cannot do what is asked of it.
    """
    problem = impossible(request, configuration)
    if problem:
        raise ContradictoryRequest(problem)
    return price(request, configuration)


def impossible(request: Request, configuration: Configuration) -> str:
    """Why a configuration cannot be run by anything, in one sentence; empty when it can."""
    gpus, strategy, offload = request.cluster.gpus, configuration.strategy, configuration.offload
    if configuration.world_size != gpus:
        return (
            f"dp {configuration.dims.data_parallel} x tp {configuration.tp} x pp {configuration.pp}"
            f"{f' x cp {configuration.cp}' if configuration.cp > 1 else ''} ="
            f" {configuration.world_size} is not the {gpus} GPUs asked for"
        )
    if strategy == "single" and gpus > 1:
        return f"strategy single uses one GPU, not {gpus}; use ddp, fsdp or zero1-3"
    if offload != "none" and offload not in offloads_of(strategy, configuration.backend):
        possible = ", ".join(offloads_of(strategy, configuration.backend)) or "none"
        return f"--offload {offload} is not possible with {strategy}; possible: {possible}"
    if configuration.offload_ratio < 1 and (offload == "none" or configuration.backend != "native"):
        return (
            f"--offload-ratio {configuration.offload_ratio:g} is for --backend native with an --offload; leave it out"
        )
    if not compresses(strategy, configuration.backend, configuration.gradient_compression):
        return "--gradient-compression int8 is for ddp, and zero1-3 with --backend native; use bf16, which all can"
    if (configuration.backend == "torch") == (strategy in words.ZERO_STAGES):
        return f"backend {configuration.backend} does not run {strategy}; use {words.default_backend(strategy)}"
    if configuration.backend == "native" and configuration.precision in words.SCALED_PRECISIONS:
        return f"backend native has no {configuration.precision} products; use --backend deepspeed, or --precision bf16"
    lacks = deepspeed_lacks(request.cluster.device, configuration.precision)
    if lacks and configuration.backend == "deepspeed":
        return f"{lacks}; {WITHOUT_DEEPSPEED}"
    if strategy in words.FSDP_STRATEGIES and configuration.optimizer == "adafactor":
        return f"torch's Adafactor cannot step on the shards of {strategy}; use zero1-3, ddp, or another optimizer"
    if strategy in words.FSDP_STRATEGIES and request.facts.kind == "vision-text":
        # torch 2.13, distributed/fsdp/_fully_shard: "fully_shard doesn't support scalar parameters" (logit_scale).
        return f"torch's FSDP2 cannot shard the scalar logit_scale of {request.facts.name}; use zero1-3 or ddp"
    if strategy in ("zero2", "zero3") and configuration.backend == "deepspeed" and configuration.pp > 1:
        # DeepSpeed 0.19, runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism".
        return f"DeepSpeed has no {strategy} in a pipeline (--pp {configuration.pp}); use zero1, fsdp or ddp, or --pp 1"
    return _indivisible(request, configuration)


def _indivisible(request: Request, configuration: Configuration) -> str:
    heads, layers = request.facts.num_heads, request.facts.total_layers
    if request.facts.recorded_as and configuration.tp * configuration.pp > 1:
        return f"nothing is known of how {request.facts.name} splits into --tp or --pp; use data parallelism"
    if configuration.tp > 1 and heads % configuration.tp:
        return f"--tp {configuration.tp} does not divide the {heads} attention heads of {request.facts.name}"
    if configuration.pp > layers:
        return f"--pp {configuration.pp} is more than the {layers} blocks of {request.facts.name}"
    return ""


def compresses(strategy: str, backend: str, compression: words.Compression) -> bool:
    """Whether a strategy can send its gradients so: 16 bits are a dtype for every one, 8 bits our own exchange."""
    return compression != "int8" or strategy in ("single", "ddp") or backend == "native"


def offloads_of(strategy: str, backend: str) -> tuple[words.Offload, ...]:
    """What a strategy can offload, `none` left out. DeepSpeed swaps to NVMe in stage 3 alone."""
    if strategy == "zero3":
        return ("optimizer", "all", "nvme")
    if strategy in ("zero1", "zero2"):
        return ("optimizer", "nvme") if backend == "native" else ("optimizer",)
    return ("all",) if strategy in words.FSDP_STRATEGIES else ()


def plan_of(priced: Priced, time: StepTime) -> Plan:
    """The whole plan, with notes and provenance, and with the interval of its step time."""
    job, configuration = priced.job, priced.job.configuration
    expected = priced.experience.time_of(job, time) if time.step_seconds_low is None else time
    predicted = expected.predicted_step_seconds
    like_it = priced.experience.correction(job).sentence() if predicted is None else ""
    seen = like_it if predicted is None else priced.experience.known[configuration].sentence(predicted)
    blocked = unrunnable(configuration)
    sections = described(job)
    notes = (blocked, priced.judgement.reason, seen, *priced.notes, *_remarks(priced))
    return Plan(
        model=sections["model"],
        cluster=sections["cluster"],
        workload=sections["workload"],
        configuration=configuration,
        memory=priced.memory,
        time=expected,
        throughput=throughput(job, expected),
        verdict=priced.judgement.verdict,
        limited_by=limited_by(expected),
        runnable=not blocked,
        notes=tuple(note for note in notes if note),
        provenance=provenance(job, priced.memory_source, measured=predicted is not None, like_it=bool(like_it)),
    )


def unrunnable(configuration: Configuration) -> str:
    """Why `dsplan run` cannot run a configuration today; empty when it can."""
    if configuration.precision in words.SCALED_PRECISIONS:
        return (
            f"dsplan run has no {configuration.precision} products; accelerate with torchao, torchtitan and Megatron-LM"
            " run them"
        )
    if not configuration.splits_model:
        return ""
    further = "".join(
        f" x {name} {size}" for name, size in (("cp", configuration.cp), ("ep", configuration.ep)) if size > 1
    )
    degrees = f"tp {configuration.tp} x pp {configuration.pp}{further}"
    trainer = "torchtitan" if configuration.strategy in words.FSDP_STRATEGIES else "megatron"
    written = trainer if configuration.zero_stage < 2 else "torchrun"
    return f"dsplan run cannot yet run {degrees}; dsplan emit --format {written} can write it"


def _remarks(priced: Priced) -> list[str]:
    job = priced.job
    facts, device, configuration = job.facts, job.cluster.device, job.configuration
    remarks = []
    if facts.traced:
        remarks.append(f"activations and operations are those of a trace of {facts.name} with a batch of its own")
    elif facts.kind == "custom" and priced.memory_source != "traced":
        why = f": {facts.note}" if facts.note else ""
        remarks.append(f"activations are a rule of thumb from {facts.name}'s parameters{why}")
    if priced.memory_source == "datasheet" and facts.kind != "custom" and differs(job):
        near = f"the nearest one's memory counts, of which one in twenty is {NEAREST_FORM_ERROR:.0%} under or more"
        remarks.append(f"no {facts.model_type} of this structure was ever traced: {near}; --exact traces it")
    if configuration.attention != "eager" and facts.eager_only:
        remarks.append(f"transformers runs {facts.model_type} with eager attention only; counted so")
    if configuration.attention == "flash" and configuration.precision == "fp32":
        remarks.append("flash attention takes 16-bit types only; in fp32 the run needs --attention sdpa")
    if configuration.precision.startswith("bf16") and not device.supports_bf16 and not device.is_cpu:
        remarks.append(f"{device.name} has no bf16 units; fp16 is its fast precision")
    if loads_once(job):
        copies = f"{job.cluster.gpus_per_node} copies of the model, {format_bytes(MADE_BYTES * job.counts.total)} each"
        way = "deepspeed.zero.Init" if configuration.zero_stage else "accelerate's cpu_ram_efficient_loading"
        remarks.append(f"a node has no room to load {copies}: counted for one, as {way} makes it")
    asked, capacity = job.workload.max_memory_bytes, job.cluster.capacity_bytes
    if asked is not None and asked > capacity:
        usable = f"the {format_bytes(capacity)} usable on one {device.name}, which stay the limit"
        remarks.append(f"--max-memory-gb {asked / GB:g} is more than {usable}")
    return remarks
