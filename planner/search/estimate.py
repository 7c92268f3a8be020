"""Estimate: one exact configuration, priced and judged."""

from __future__ import annotations

from dataclasses import replace

from hardware_db.records import dataclass
from hardware_db.units import GB, format_bytes
from planner import vocabulary as words
from planner.calibration.experience import NO_EXPERIENCE, Experience
from planner.cost.code_bases import code_base
from planner.cost.combinations import Adapted, why_contradictory, why_refused
from planner.cost.generation import engine_need, engines_of
from planner.cost.memory import memory_estimate
from planner.cost.memory.activations.figures import blocks_on_stage, figures_of, has_written_form
from planner.cost.memory.activations.instants import selective_saves
from planner.cost.memory.host import NO_ROOM_TO_LOAD, loading_of
from planner.cost.memory.ledger import bytes_at, plus
from planner.cost.memory.load import made_bytes
from planner.cost.memory.overhead import NEAREST_FORM_ERROR, has_other_form, least_use
from planner.cost.memory.states import is_uneven, nominal_states_of, states_of
from planner.cost.memory.units import shards_of, shards_over, units_of
from planner.cost.precision import EAGER_CAST_BYTES, recipe_of, scaled_products
from planner.cost.split import micro_batches_in_flight, why_other_layers
from planner.cost.timing import step_time, throughput
from planner.cost.verdict import Judgement, judge, limited_by
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts
from planner.search.device_counts import MOST_DEVICES
from planner.search.post_training import usual_loss
from planner.search.request import WITHOUT_DEEPSPEED, Request, why_not_deepspeed
from planner.types.job import Job, Workload, provenance, sections_of
from planner.types.plan import Configuration, MemoryEstimate, Plan, StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A job with its memory and whether that fits.

    `memory_source` is where the memory comes from, `notes` what there is to say of it, `experience` what was measured
    before.
    """

    job: Job
    memory: MemoryEstimate
    judgement: Judgement
    memory_source: words.Provenance = "datasheet"
    notes: tuple[str, ...] = ()
    experience: Experience = NO_EXPERIENCE


def job_of(request: Request, configuration: Configuration) -> Job:
    """Return the request's work in one configuration."""
    return Job(
        facts=request.facts,
        counts=request.counts,
        workload=request.workload,
        cluster=request.cluster,
        configuration=configuration,
    )


def price(request: Request, configuration: Configuration, *, stage: int | None = None) -> Priced:
    """Memory and verdict of a configuration; time is left to `plan_of`, since most candidates never need it.

    With `stage` they are those of one stage of its pipeline, which the job looks at.
    """
    job = replace(job_of(request, configuration), stage=stage or 0)
    memory = memory_estimate(job, stages=None if stage is None else (stage,))
    experience = request.experience
    return Priced(
        job=job,
        memory=memory,
        judgement=judge_job(job, memory, experience),
        memory_source="traced" if job.facts.traced else "datasheet",
        experience=experience,
    )


def time_step(priced: Priced) -> StepTime:
    """Return what the job takes: as measured where this machine ran it, as expected from runs like it elsewhere."""
    run = priced.experience.known_runs.get(priced.job.configuration)
    return priced.experience.expected(priced.job) if run is None else run.answer(step_time(priced.job))


def resident_bytes(job: Job) -> float:
    """Weights, gradients and optimizer states on the device, all there when a backward pass ends."""
    states = states_of(job, recipe_of(job))
    return states.parameters + states.gradients + states.optimizer


def least_bytes(job: Job) -> float:
    """Return device memory that a job takes at least.

    That is what is there when a forward ends: what rests there, what all blocks keep of the micro-batches in flight,
    their inputs at least, and the last block's weights where they are sharded. Before the first backward pass of a step
    there are no gradients. Beside tensors there are the driver's context and communicators.
    """
    recipe = recipe_of(job)
    states, figures, chosen = states_of(job, recipe), figures_of(job, recipe), job.configuration
    inputs = 0.0
    if not chosen.activations_on_host:
        counts = blocks_on_stage(job, figures)
        for count, block in zip(counts, figures.blocks, strict=True):
            kept = bytes_at(block.kept, job.sequences)
            if chosen.activation_checkpointing == "full":
                kept = min(kept, bytes_at(block.boundary, job.sequences))
            elif chosen.activation_checkpointing == "selective":
                kept = min(kept, bytes_at(plus(block.boundary, block.products), job.sequences))
            inputs += count * kept
    in_flight = micro_batches_in_flight(chosen, job.stage)
    inputs *= in_flight
    if recipe.frozen is None and chosen.state_shards > 1:
        units, by_block = units_of(job), chosen.strategy in words.FSDP_STRATEGIES
        gathered = units.largest_block if by_block else units.largest if chosen.zero_stage == 3 else 0
        inputs += gathered * recipe.gather
    gradients = states.gradients if chosen.gradient_accumulation_steps > in_flight else 0.0
    return least_use(job, states.parameters + states.optimizer + gradients + inputs)


def judge_job(job: Job, memory: MemoryEstimate, experience: Experience) -> Judgement:
    """Return whether a job with this memory fits: by what there is, and by what ran out of memory before."""
    judgement = _judge_engine(job) or judge(job, memory, _nvme_bytes(job))
    oom_record = None if judgement.verdict == "does_not_fit" else experience.oom_record(job, memory)
    return judgement if oom_record is None else oom_record.judgement(memory)


def _judge_engine(job: Job) -> Judgement | None:
    """Return that an engine has no room for the weights and one sample; None where it has, or there is none."""
    post = job.workload.post
    if post is None or not job.workload.generates or post.rollout == "hf":
        return None
    need, share = engine_need(job), engines_of(job).reserved
    if need <= share:
        return None
    has = f"{format_bytes(share)} ({post.rollout_memory:.0%}); give --rollout-memory or --rollout-tp more"
    reason = f"an engine needs {format_bytes(need)} of each GPU for weights and one sample, and has {has}"
    return Judgement(verdict="does_not_fit", pressure=need / share, reason=reason)


def _nvme_bytes(job: Job) -> float:
    """Return what one node keeps on its disks."""
    if job.configuration.offload != "nvme":
        return 0.0
    return states_of(job, recipe_of(job)).nvme * job.cluster.gpus_per_node


def estimate(request: Request, configuration: Configuration) -> Plan:
    """Return the plan of one configuration on the request's cluster.

    Raises:
        ContradictoryRequest: as `require_possible`.
    """
    priced = require_possible(request, configuration)
    return plan_of(priced, time_step(priced))


def require_possible(request: Request, configuration: Configuration) -> Priced:
    """Return the price of a configuration that somebody asked for by name.

    Raises:
        ContradictoryRequest: the configuration's degrees do not use exactly the cluster's devices, or a degree does not
            divide what it splits, or the strategy cannot do what is asked of it.
    """
    problem = why_impossible(request, configuration)
    if problem:
        raise ContradictoryRequest(problem)
    return price(request, configuration)


def why_impossible(request: Request, configuration: Configuration) -> str | None:
    """Return why a configuration cannot be run by anything, in one sentence; None where it can."""
    gpus, strategy = request.cluster.gpus, configuration.strategy
    if configuration.world_size != gpus:
        return (
            f"dp {configuration.dims.data_parallel} x tp {configuration.tp} x pp {configuration.pp}"
            f"{f' x cp {configuration.cp}' if configuration.cp > 1 else ''} ="
            f" {configuration.world_size} is not the {gpus} GPUs asked for"
        )
    code = code_base(request.workload.code)
    if strategy not in code.strategies:
        return f"{code.name} has no {strategy}; use {', '.join(code.strategies)}"
    lacks = why_not_deepspeed(request.cluster.device, configuration.precision)
    if lacks and configuration.backend == "deepspeed":
        return f"{lacks}; {WITHOUT_DEEPSPEED}"
    if strategy in words.FSDP_STRATEGIES and request.facts.kind == "vision-text":
        # torch 2.13, distributed/fsdp/_fully_shard: "fully_shard doesn't support scalar parameters" (logit_scale).
        return f"torch's FSDP2 cannot shard the scalar logit_scale of {request.facts.name}; use zero1-3 or ddp"
    return (
        why_contradictory(configuration)
        or _why_code_cannot(request, configuration)
        or why_indivisible(request, configuration)
    )


def _why_code_cannot(request: Request, configuration: Configuration) -> str | None:
    """Return what a configuration asks for that its code base cannot do, in one sentence; None where it can."""
    code = code_base(request.workload.code)
    for name in words.DEGREES:
        if getattr(configuration, name) > 1 and name not in code.degrees:
            return f"{code.title} has no {name}; use {name} 1 or another --code"
    if configuration.splits_model and configuration.strategy in code.whole_strategies:
        return f"{code.title} combines {configuration.strategy} with no other degree; use fsdp"
    if configuration.recompute_modules and not code.lists_recomputed:
        return f"{code.title} has no list of modules to recompute; leave --recompute-modules out"
    for word, value, allowed in (
        ("schedule", configuration.pp_schedule if configuration.pp > 1 else code.schedules[0], code.schedules),
        ("offload", configuration.offload, code.offloads),
        ("checkpointing", configuration.activation_checkpointing, code.checkpointings),
    ):
        if value not in allowed:
            return f"{code.title} has no {word} {value}; it has {' and '.join(allowed)}"
    return None


def why_indivisible(request: Request, configuration: Configuration) -> str | None:
    """Return why a model cannot be split by a configuration's degrees, in one sentence; None where it can."""
    if not configuration.splits_model:
        return None
    facts, tp, pp, cp, ep = (request.facts, *(getattr(configuration, name) for name in words.DEGREES))
    code = code_base(request.workload.code)
    layers, stages = facts.total_layers, pp * configuration.virtual_stages
    if facts.recorded_as:
        return f"nothing is known of how {facts.name} splits into tp, pp, cp or ep; use data parallelism"
    if heads_left_over(facts, tp):
        return f"tp {tp} does not divide the {facts.num_heads} attention heads of {facts.name}"
    if tp > 1 and code.key_heads == "divided" and facts.num_kv_heads % tp:
        heads = f"the {facts.num_kv_heads} heads of keys of {facts.name}"
        return f"tp {tp} does not divide {heads}, which {code.title} asks for"
    if configuration.sequence_parallel and code.runs_here and not facts.splits_sequences:
        return (
            f"sequence parallelism needs the places where {facts.name} gathers its tokens, and transformers has no"
            f" tensor-parallel plan of {facts.model_type}; use no sequence parallelism"
        )
    if other := why_other_layers(configuration.stage_layers, layers, facts.name):
        return other
    if pp > layers:
        return f"pp {pp} is more than the {layers} blocks of {facts.name}"
    if stages > layers + 2:  # the first piece may be the embedding alone, the last one the head
        virtual = f"virtual stages {configuration.virtual_stages} = {stages}"
        return f"pp {pp} x {virtual} is more than the {layers} blocks of {facts.name} and both ends"
    if cp > 1 and facts.kind not in ("decoder", "custom"):
        return f"cp {cp} is for decoders, and {facts.name} is of kind {facts.kind}; use cp 1"
    if cp > 1 and facts.runs_eager(configuration.attention):
        return f"cp {cp} needs fused attention, and {facts.name} runs eager; use cp 1"
    if why := why_no_experts(facts, ep):
        return why
    if ep > 1 and facts.num_experts % ep:
        return f"ep {ep} does not divide the {facts.num_experts} experts of {facts.name}"
    return None


def why_no_experts(facts: ModelFacts, ep: int) -> str | None:
    """Return why a model has nothing to spread over ep ranks; None where it has."""
    if ep == 1 or facts.is_moe:
        return None
    return f"ep {ep} spreads experts over ranks, and {facts.name} has none; use ep 1"


def adapted_of(workload: Workload) -> Adapted | None:
    """Return what is trained beside frozen weights; None where there is nothing."""
    return Adapted(method=workload.method, load_dtype=workload.load_dtype) if workload.freezes else None


def heads_left_over(facts: ModelFacts, tp: int) -> bool:
    """Return whether tp ranks cannot have as many heads each.

    A module of the user's own may not say how many it has, which reads as one, and is tried when it is split.
    """
    return facts.num_heads % tp > 0 and (facts.kind != "custom" or facts.num_heads > 1)


LAST_RESORT_MFU = 0.02
"""Below this share of the dense peak a run is mostly waiting for a link or a disk."""


def is_last_resort(plan: Plan) -> bool:
    """Return whether a plan trains at all only by moving states through a link that is far too slow for the device."""
    return _is_slow(plan.configuration, plan.throughput.mfu)


def _is_slow(configuration: Configuration, mfu: float | None) -> bool:
    return configuration.offload != "none" and mfu is not None and mfu < LAST_RESORT_MFU


def waits_mostly(job: Job, time: StepTime) -> bool:
    """Return whether a timed job mostly waits for offloaded states."""
    return job.configuration.offload != "none" and _is_slow(job.configuration, throughput(job, time).mfu)


def plan_of(priced: Priced, time: StepTime) -> Plan:
    """Return the whole plan, with notes and provenance, and with the interval of its step time."""
    job, configuration = priced.job, priced.job.configuration
    expected = priced.experience.time_of(job, time) if time.step_seconds_low is None else time
    predicted = expected.predicted_step_seconds
    like_it = priced.experience.correction(job).sentence() if predicted is None else ""
    seen = like_it if predicted is None else priced.experience.known_runs[configuration].sentence(predicted)
    blocked = _why_run_elsewhere(job) or why_refused(configuration, adapted_of(job.workload))
    sections = sections_of(job)
    rates = throughput(job, expected)
    slow = f"a last resort: {rates.mfu or 0:.1%} of the dense peak, the rest of a step waits for offloaded states"
    slow = slow if _is_slow(configuration, rates.mfu) else ""
    notes = (blocked, priced.judgement.reason, slow, seen, *priced.notes, *_remarks(priced))
    return Plan(
        model=sections["model"],
        cluster=sections["cluster"],
        workload=sections["workload"],
        configuration=configuration,
        memory=priced.memory,
        time=expected,
        throughput=rates,
        verdict=priced.judgement.verdict,
        limited_by=limited_by(expected),
        runnable=not blocked,
        notes=tuple(note for note in notes if note),
        provenance=provenance(job, priced.memory_source, measured=predicted is not None, like_it=bool(like_it)),
    )


def _remarks_on_code(job: Job) -> list[str]:
    """Return what of the code that was asked for is not counted as its own."""
    facts, work, remarks = job.facts, job.workload, []
    code = code_base(work.code)
    own_blocks = has_written_form(facts, work.code, work.sequence_length, compiled=work.compile)
    if code.eager.block is not None and not own_blocks:
        remarks.append(f"only plain decoders' blocks are known of {code.name}; of {facts.name} transformers' count")
    if work.compile and code.compiled is None:
        remarks.append(f"--compile changes nothing that is known of {code.name}, whose kernels are fused already")
    elif work.compile and code.eager.block is None and not own_blocks:
        remarks.append(f"only plain decoders' blocks are known compiled; those of {facts.name} take eager ones' memory")
    unusual = work.loss not in ("plain", usual_loss(work.task, work.code))
    own = ["--compile"] * work.compile + [f"--loss {work.loss}"] * unusual
    if own and code.runs_here:
        remarks.append(f"{' and '.join(own)}: counted as the script does it; dsplan run changes no module")
    if unusual and (facts.kind == "custom" or not facts.vocab_size):
        remarks.append(f"--loss {work.loss} is counted for language models of the catalogue, not for {facts.name}")
    return remarks


def _why_run_elsewhere(job: Job) -> str | None:
    """Return which tool runs the code that a job names, where `dsplan run` does not."""
    code = code_base(job.workload.code)
    if code.runs_here:
        return None
    return f"{code.runs_with} runs the code {code.name}; dsplan run runs transformers' modules and plain torch"


def _remarks_on_copies(job: Job) -> list[str]:
    """Return what the script must do beside the training that was asked for, and how it is counted."""
    workload, remarks = job.workload, []
    if workload.freezes and (workload.code != "transformers" or workload.compile):
        remarks.append("what is frozen and adapters are counted as transformers' modules and PEFT's run eagerly")
    if workload.ema:
        remarks.append("the script keeps the average of the weights itself (torch.optim.swa_utils.AveragedModel)")
    if job.has_reference:
        beside = "the base model without its adapters" if workload.method != "full" else "a second, frozen copy"
        pairs = "; a sample is two sequences" if workload.task in words.PAIRED else ""
        remarks.append(f"the reference model is {beside}{pairs}")
    if workload.task == "reward":
        remarks.append("a sample is two sequences; the head gives one number for each")
    if recipe_of(job).dequantises and (job.cluster.device.is_cpu or loading_of(job) != "streamed"):
        remarks.append("the script loads the model quantised (transformers' BitsAndBytesConfig) and adds the adapters")
    return remarks


def _remarks(priced: Priced) -> list[str]:
    job = priced.job
    facts, device, configuration = job.facts, job.cluster.device, job.configuration
    remarks, recipe = _remarks_on_code(job), recipe_of(job)
    if facts.traced:
        remarks.append(f"activations and operations are those of a trace of {facts.name} with a batch of its own")
    elif facts.kind == "custom" and priced.memory_source != "traced":
        why = f": {facts.note}" if facts.note else ""
        remarks.append(f"activations are a rule of thumb from {facts.name}'s parameters{why}")
    if priced.memory_source == "datasheet" and facts.kind != "custom" and has_other_form(job):
        near = f"the nearest one's memory counts, of which one in twenty is {NEAREST_FORM_ERROR:.0%} under or more"
        remarks.append(f"no {facts.model_type} of this structure was ever traced: {near}; --exact traces it")
    if facts.kind == "diffusion":
        remarks.append("the denoiser alone is counted: latents and text embeddings are made before the step")
    remarks += _remarks_on_copies(job)
    if configuration.attention != "eager" and job.eager_attention and job.workload.code == "transformers":
        other = ", or with --attention flash" if facts.fused_by_flash else " only"
        remarks.append(f"transformers runs {facts.model_type} with eager attention{other}; counted eager")
    if configuration.attention == "flash" and configuration.precision == "fp32":
        remarks.append("flash attention takes 16-bit types only; in fp32 the run needs --attention sdpa")
    if configuration.precision.startswith("bf16") and not device.supports_bf16 and not device.is_cpu:
        remarks.append(f"{device.name} has no bf16 units; fp16 is its fast precision")
    scaled = scaled_products(job)
    if scaled is not None and scaled.activation_casts == EAGER_CAST_BYTES:
        remarks.append("without --compile torchao's casts run kernel by kernel, and are counted so")
    if configuration.activation_checkpointing == "selective" and not selective_saves(job, recipe):
        remarks.append(
            "selective checkpointing keeps more here than none does: products that backward does not need; use"
            " --checkpointing none or full"
        )
    remarks += _remarks_on_what_nobody_ran(job)
    remarks += _remarks_on_whole_experts(job) or _remarks_on_uneven_shards(job)
    remarks += _remarks_on_loading(job)
    requested, capacity = job.workload.max_memory_bytes, job.cluster.capacity_bytes
    if requested is not None and requested > capacity:
        usable = f"the {format_bytes(capacity)} usable on one {device.name}, which stay the limit"
        remarks.append(f"--max-memory-gb {requested / GB:g} is more than {usable}")
    return remarks


def _remarks_on_loading(job: Job) -> list[str]:
    """Return how the model must be loaded where a node has no room for one in every process."""
    loading, ranks = loading_of(job), job.cluster.gpus_per_node
    if job.cluster.device.is_cpu or loading not in ("once", "streamed"):
        return []
    copies = f"{ranks} copies of the model" if ranks > 1 else "the model"
    each = f"{format_bytes(made_bytes(job))}{' each' if ranks > 1 else ''}"
    without = f"{NO_ROOM_TO_LOAD} {copies}, {each}"
    if loading == "once":
        by_deepspeed = job.configuration.zero_stage
        loader = "deepspeed.zero.Init" if by_deepspeed else "accelerate's cpu_ram_efficient_loading"
        return [f"{without}: counted for one, as {loader} makes it"]
    codes = " and stores them in 4 bits" if recipe_of(job).dequantises else ""
    return [f"{without}: every rank reads its own parts of the files{codes}, by dsplan.initialize(weights=DIRECTORY)"]


def _remarks_on_what_nobody_ran(job: Job) -> list[str]:
    """Return where a question goes beyond what a model was trained at, or any public training went."""
    facts, length, gpus = job.facts, job.workload.sequence_length, job.cluster.gpus
    remarks = []
    positions = facts.max_position_embeddings
    if facts.position_type == "rope" and facts.family != "generic" and 0 < positions < length:
        remarks.append(f"{facts.name} was made for {positions:,} positions; those of {length:,} beyond are untrained")
    if gpus > MOST_DEVICES:
        remarks.append(
            f"no public training that is known of used more than {MOST_DEVICES:,} GPUs: what stragglers, failures and"
            f" congestion cost on {gpus:,} is not counted"
        )
    return remarks


def _remarks_on_uneven_shards(job: Job) -> list[str]:
    """Return what a rank rests with where rows of weights do not spread evenly over FSDP2's ranks."""
    recipe = recipe_of(job)
    states, even = states_of(job, recipe), nominal_states_of(job, recipe)
    if job.configuration.strategy not in words.FSDP_STRATEGIES or not is_uneven(states, even):
        return []
    return [
        "FSDP2 shards the first dimension of weights, which is not even here: the busiest rank rests with"
        f" {format_bytes(states.on_device)} of states, where even shards would be {format_bytes(even.on_device)}"
    ]


def _remarks_on_whole_experts(job: Job) -> list[str]:
    """Return what a rank holds beyond its share of experts; FSDP2 shards dimension 0 of tensors that hold all."""
    chosen, experts = job.configuration, job.facts.num_experts
    ranks = chosen.expert_shards
    local = experts // chosen.ep
    if chosen.strategy not in words.FSDP_STRATEGIES or not job.facts.is_moe or shards_over(job).evenly:
        return []
    held, share = shards_of(job).experts, units_of(job).experts / ranks
    if local >= ranks or held <= share:
        return []
    weight = recipe_of(job).weight
    offered = "" if chosen.ep > 1 else ", and --ep spreads experts before that"
    return [
        f"FSDP2 deals out whole experts (it shards dimension 0): {local} over {ranks} ranks, so that some ranks hold"
        f" {format_bytes(weight * held)} of expert weights where an even share is {format_bytes(weight * share)};"
        f" torchtitan (--code torchtitan) cuts single experts{offered}"
    ]
