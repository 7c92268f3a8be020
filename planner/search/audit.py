"""A config that was read, as a plan: what is wrong with it, and the best that its trainer can run instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from hardware_db.records import dataclass
from hardware_db.units import format_bytes
from planner import limits
from planner import vocabulary as words
from planner.cost.code_bases import code_base
from planner.cost.verdict import device_limit, host_limit
from planner.errors import ContradictoryRequest
from planner.read.edits import Keys, changes_to, edited, unified
from planner.read.form import SEVERITIES, TWO_BATCHES, TWO_PRECISIONS, Finding, Reading
from planner.read.trainers import PER_NODE, TRAINERS
from planner.search.estimate import estimate, is_last_resort
from planner.search.exact import ExactOptions, exact
from planner.search.ranking import ONE_STRATEGY
from planner.search.request import Degrees, Request
from planner.search.search import recommend
from planner.types.plan import Configuration, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Better:
    """A plan that the same trainer can run.

    `gain` is by how much it is faster, None where it fits, has room, or is not refused, and the files' own is.
    `texts` are the files that it takes, old and new; empty where they have no keys for it. `left` are errors that stay.
    """

    plan: Plan
    gain: float | None
    texts: Mapping[str, tuple[str, str]]
    left: tuple[Finding, ...] = ()

    @property
    def diff(self) -> str:
        """The change of the files as a unified diff."""
        return unified(self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """A config's plan, None with `why` where there is none, its findings, worst first, and a better plan."""

    request: Request | None
    plan: Plan | None
    findings: tuple[Finding, ...]
    why: str = ""
    better: Better | None = None


def exact_options(answers: Mapping[str, Any], gpus: int, nodes: int = 1) -> ExactOptions:
    """Return the configuration that a config's answers say, on so many GPUs of so many nodes.

    Raises:
        ContradictoryRequest: copies of the model times the ranks that share one are not those GPUs, or nobody has so
            many samples.
    """
    names = ExactOptions.__dataclass_fields__
    options = {name: value for name, value in answers.items() if name in names and value is not None}
    strategy = options.get("strategy")
    if gpus == 1 and strategy in ("ddp", "hsdp", "fsdp-grad-op"):
        options["strategy"] = "single" if strategy == "ddp" else "fsdp"
    elif gpus > 1 and strategy == "single":
        options["strategy"] = "ddp"
    chosen = options.get("strategy") or ("single" if gpus == 1 else "ddp")
    if options.get("backend") and options["backend"] not in words.backends_of(chosen):
        options.pop("backend")
    if options.get("activations_on_host") and options.get("checkpointing", "none") == "none":
        options.pop("activations_on_host")
    samples = int(options.get("micro_batch") or 1) * int(options.get("grad_accum") or 1) * gpus
    if not limits.SAMPLES.allows(samples):
        raise ContradictoryRequest(f"a step would take {samples:,} samples; give {limits.SAMPLES}")
    split = prod(int(options.get(name) or 1) for name in ("tp", "pp"))
    if options.get("strategy") == "hsdp" and (options.get("shard") or 0) * split == gpus and "copies" not in answers:
        options["strategy"] = "fsdp"
        options.pop("shard")
    if options.get("strategy") == "hsdp" and (copies := answers.get("copies")):
        _share_between(options, nodes if copies == PER_NODE else copies, gpus)
    return ExactOptions(**options)


def _share_between(options: dict[str, Any], copies: int, gpus: int) -> None:
    """Fill in how many ranks share one of `copies` of the model; the ranks of one sample are among them."""
    split = prod(int(options.get(name) or 1) for name in ("tp", "pp"))
    if copies * split > gpus:
        raise ContradictoryRequest(f"{copies:,} copies of the model need {copies * split:,} GPUs or more, not {gpus:,}")
    shard = options.get("shard") or gpus // split // copies
    if shard * copies * split != gpus:
        of_split = f" x {split} of tp and pp" if split > 1 else ""
        raise ContradictoryRequest(
            f"{copies} copies of the model x {shard} ranks that share one{of_split} ="
            f" {copies * shard * split} ranks, not {gpus}; change one of them"
        )
    if 1 in (shard, copies):
        options["strategy"] = "ddp" if shard == 1 else "fsdp"
        options.pop("shard", None)
    else:
        options["shard"] = shard


def audit(request: Request, reading: Reading, answers: Mapping[str, Any]) -> Audit:
    """Price what a config says, find what is wrong with it, and search what its trainer can run instead."""
    findings = list(reading.findings)
    try:
        options = exact_options(answers, request.cluster.gpus, request.cluster.nodes)
        options, batch = _without_contradiction(request, options, reading)
        findings += batch
        exact_request, configuration = exact(request, options)
        plan = estimate(exact_request, configuration)
    except ContradictoryRequest as error:
        findings.append(Finding(severity="error", id="impossible", message=str(error)))
        return Audit(request=request, plan=None, findings=_worst_first(findings), why=str(error))
    mends = _mends(reading, findings, plan)
    better = _better(exact_request, reading, plan, mends)
    if better is not None and better.texts:
        better = replace(better, left=_errors_left(exact_request, findings, mends, better.plan))
    findings += _of_memory(exact_request, plan) + _of_hardware(exact_request, plan)
    findings += _of_choice(plan, better)
    return Audit(request=exact_request, plan=plan, findings=_worst_first(findings), better=better)


def _worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return tuple(sorted(findings, key=lambda item: order[item.severity]))


def _without_contradiction(
    request: Request, options: ExactOptions, reading: Reading
) -> tuple[ExactOptions, list[Finding]]:
    """Return the options with the global batch that micro-batch and accumulation come to, and the error of the files'.

    Where they name one of both it is the next smaller multiple.
    """
    total, micro, accumulation = options.global_batch, options.micro_batch, options.grad_accum
    if total is None:
        return options, []
    try:
        exact(request, options)
    except ContradictoryRequest as error:
        if "--global-batch" not in str(error):
            return options, []
        ranks = request.cluster.gpus // max(options.tp * options.pp * options.cp, 1)
        product = (micro or 1) * (accumulation or 1) * ranks
        factors = [f"micro-batch {micro}"] if micro else []
        factors += [f"accumulation {accumulation}"] if accumulation else []
        step = " x ".join((*factors, f"{ranks} ranks"))
        if micro and accumulation:
            message = f"the batch triple does not multiply: {step} = {product} is not {total}"
        else:
            message = f"the global batch {total} is no multiple of {step}"
            product *= max(total // product, 1)
        key, file, line = _place_of_batch(reading)
        wrong = Finding(severity="error", id=_TRIPLE, message=message, key=key, file=file, line=line)
        mended = replace(options, global_batch=product)
        try:
            exact(request, mended)
        except ContradictoryRequest:  # other ranks than those count samples
            mended = replace(options, global_batch=None)
        return mended, [wrong]
    return options, []


_TRIPLE = "batch-triple"


def _place_of_batch(reading: Reading) -> tuple[str, str, int]:
    """Return the key that says the global batch, with its file and line; empty where no key says it as it is."""
    total = reading.answers.get("global_batch")
    for item in reading.read:
        if item.field == "global_batch" and item.value == total:
            return item.key, item.file, item.line
    return "", "", 0


# What a trainer refuses, put right in its files.


def _mends(reading: Reading, findings: Sequence[Finding], plan: Plan) -> dict[str, Any]:
    """Return the keys of the trainer's own config, and their values, without which it refuses what the files say."""
    values = {_TRIPLE: plan.configuration.global_batch_size, TWO_PRECISIONS: False, TWO_BATCHES: None}
    mends = {}
    for finding in findings:
        setting = reading.settings.get(finding.key)
        is_own = setting is not None and setting.source.path == finding.file and 0 <= setting.start < setting.end
        if finding.id in values and is_own:
            mends[finding.key] = values[finding.id]
    return mends


def _errors_left(request: Request, findings: Sequence[Finding], mends: Keys, plan: Plan) -> tuple[Finding, ...]:
    """Return the errors that stay in files whose changed texts say `plan` and are without what was mended."""
    errors = [item for item in (*findings, *_of_hardware(request, plan)) if item.severity == "error"]
    return tuple(item for item in errors if item.key not in mends)


# Findings of a plan.


def _of_memory(request: Request, plan: Plan) -> list[Finding]:
    """Find by how much a plan misses a device or its host, or how near it is."""
    memory, findings = plan.memory, []
    need = memory.device_needed_bytes or memory.device_used_upper_bytes
    have = device_limit(request.workload, request.cluster)
    if need > have and plan.verdict == "tight":
        least = f"{format_bytes(memory.device_least_bytes)} without any margin"
        message = f"may not fit: needs up to {format_bytes(need)} of {format_bytes(have)} per GPU, {least}"
        findings.append(Finding(severity="warning", id="tight", message=message))
    elif need > have:
        beyond = f"{format_bytes(need - have)} too much (peak in {memory.peak_phase})"
        message = f"does not fit: needs {format_bytes(need)} of {format_bytes(have)} per GPU, {beyond}"
        findings.append(Finding(severity="error", id="does-not-fit", message=message))
        training = max(size for phase, size in memory.phases.items() if phase not in ("eval", "save"))
        if memory.peak_phase in ("eval", "save") and training + need - memory.peak_allocated_bytes <= have:
            message = f"training alone fits: it is {memory.peak_phase} that overflows"
            findings.append(Finding(severity="error", id=f"{memory.peak_phase}-overflows", message=message))
    elif plan.verdict == "tight":
        message = (
            f"fits without room: {format_bytes(need)} of {format_bytes(have)} per GPU; one run in twenty takes more"
        )
        findings.append(Finding(severity="warning", id="tight", message=message))
    host, room = memory.host_bytes_per_node, host_limit(request.workload, request.cluster)
    if room and host > room:
        message = f"does not fit the host: needs {format_bytes(host)} of {format_bytes(room)} per node"
        findings.append(Finding(severity="error", id="host-does-not-fit", message=message))
    if not findings and plan.verdict == "does_not_fit":
        findings.append(
            Finding(severity="error", id="does-not-fit", message=plan.notes[0] if plan.notes else "does not fit")
        )
    return findings


def _of_hardware(request: Request, plan: Plan) -> list[Finding]:
    """Find what a device has no units for, or has and is not used."""
    device, chosen, findings = request.cluster.device, plan.configuration, []
    if chosen.precision.startswith("bf16") and not device.supports_bf16 and not device.is_cpu:
        message = f"{device.name} has no bf16 units: bf16 runs emulated and slowly, or stops; use fp16"
        findings.append(Finding(severity="error", id="no-bf16", message=message))
    if chosen.precision == "fp32" and device.supports_bf16 and not device.is_cpu:
        message = f"trains in fp32 on {device.name}, which has bf16: turn bf16 on"
        findings.append(Finding(severity="warning", id="fp32", message=message))
    if chosen.attention == "eager" and not request.facts.eager_only and not device.is_cpu:
        message = "eager attention keeps every score; use sdpa or flash_attention_2"
        findings.append(Finding(severity="warning", id="eager-attention", message=message))
    if chosen.attention == "flash" and chosen.precision == "fp32":
        findings.append(
            Finding(severity="error", id="flash-in-fp32", message="flash attention takes 16-bit types only")
        )
    return findings


def _of_choice(plan: Plan, better: Better | None) -> list[Finding]:
    """Find offload and sharding that cost time and are not needed."""
    now = plan.configuration
    if better is None or better.gain is None or plan.verdict == "does_not_fit":
        return []
    then, share = better.plan.configuration, f"{better.gain:.0%}"
    if now.offload != "none" and then.offload == "none":
        message = (
            f"offload {now.offload} is not needed: {then.strategy} without it fits and is predicted {share} faster"
        )
        return [Finding(severity="warning", id="offload-for-nothing", message=message)]
    if now.strategy != then.strategy:
        message = f"{now.strategy} is slower here than {then.strategy}, which fits and is predicted {share} faster"
        return [Finding(severity="warning", id="slower-strategy", message=message)]
    recomputes = {"none": "without recomputation", "full": "with full recomputation"}
    kind = recomputes.get(then.activation_checkpointing, "with selective recomputation")
    message = f"micro-batch {then.micro_batch_size} {kind} fits and is predicted {share} faster"
    return [Finding(severity="info", id="faster", message=message)]


# A better plan of the same trainer.


def _better(request: Request, reading: Reading, plan: Plan, mends: Keys) -> Better | None:
    """Return a plan that the same trainer runs, at the same global batch, in texts that are mended.

    It is one that the files have keys for, where any does; of those about as fast the one that changes least. Where the
    files' own plan fits it is faster by more than predictions of two plans of one strategy err, and has room; where it
    fits without room and nothing is faster, it has room. Where nothing is better it is the files' own, mended.
    """
    fits = plan.verdict != "does_not_fit"
    options = [*_nearest(request, reading, plan), *_freest(request, reading, plan)]
    options = [item for item in options if item.configuration != plan.configuration]
    faster = [item for item in options if item.verdict == "fits" and _gain(plan, item) > ONE_STRATEGY]
    is_faster = bool(faster) and fits
    if is_faster or plan.verdict == "fits":
        options = faster
    else:
        options = [near for item in options for near in (*_nearer(request, plan, item), item)]
        if any(item.verdict == "fits" for item in options) or fits:
            options = [item for item in options if item.verdict == "fits"]
    written = [(item, texts) for item in options if (texts := _texts(reading, plan, item, mends))]
    if written:
        chosen, texts = _least_of(written)
        return Better(plan=chosen, gain=_gain(plan, chosen) if is_faster else None, texts=texts)
    if mends and fits and (mended := edited(reading, mends)):
        return Better(plan=plan, gain=None, texts=mended)
    if not options:
        return None
    chosen, _ = _least_of([(item, {}) for item in options])
    return Better(plan=chosen, gain=_gain(plan, chosen) if is_faster else None, texts={})


def _nearer(request: Request, plan: Plan, other: Plan) -> list[Plan]:
    """Return a plan with as much of the file's own batch and recomputation as it fits with.

    It is no slower than predictions of two plans of one strategy err.
    """
    now, then = plan.configuration, other.configuration
    batch = {name: getattr(now, name) for name in ("micro_batch_size", "gradient_accumulation_steps")}
    recomputation = {name: getattr(now, name) for name in _RECOMPUTATION}
    for kept in (batch | recomputation, batch, recomputation):
        is_same = all(getattr(then, name) == value for name, value in kept.items())
        if is_same or then.dims.data_parallel != now.dims.data_parallel:
            continue
        work = replace(request.workload, precision=then.precision)
        try:
            near = estimate(replace(request, workload=work), replace(then, **kept))
        except ContradictoryRequest:
            continue
        if near.verdict == "fits" and near.time.step_seconds <= (1 + ONE_STRATEGY) * other.time.step_seconds:
            return [near]
    return []


_RECOMPUTATION = ("activation_checkpointing", "checkpoint_every", "recompute_modules")

Texts = Mapping[str, tuple[str, str]]


def _gain(now: Plan, then: Plan) -> float:
    return now.time.step_seconds / then.time.step_seconds - 1


def _texts(reading: Reading, now: Plan, then: Plan, mends: Keys) -> Texts:
    """Return the files as they would be for another plan, and mended; none where they have no keys for it."""
    changes = changes_to(reading, now.configuration, then.configuration)
    return (edited(reading, {**mends, **changes}) or {}) if changes else {}


def _least_of(options: Sequence[tuple[Plan, Texts]]) -> tuple[Plan, Texts]:
    """Return the first of those that cannot be told from the fastest; they are in the order of how much they change."""
    fastest = min(item.time.step_seconds for item, _ in options)
    return next((item, texts) for item, texts in options if item.time.step_seconds <= (1 + ONE_STRATEGY) * fastest)


def _nearest(request: Request, reading: Reading, plan: Plan) -> list[Plan]:
    """Return plans of the same strategy, offload and degrees: another micro-batch or recomputation."""
    now = plan.configuration
    return _search(request, reading, strategies=(now.strategy,), offload=now.offload, now=now)


def _freest(request: Request, reading: Reading, plan: Plan) -> list[Plan]:
    """Return plans of all strategies that the trainer can run, best first."""
    now, trainer = plan.configuration, TRAINERS[reading.format]
    strategies = trainer.strategies
    if now.precision != "bf16-pure" or "pure_bf16" in reading.settings or trainer.shards_in_bf16:
        return _search(request, reading, strategies=strategies, offload=None, now=now)
    # Trainers that load weights in bf16 train replicas of them so, and shards in mixed precision.
    whole = tuple(name for name in strategies if name in ("single", "ddp"))
    sharded = tuple(name for name in strategies if name not in whole)
    mixed = replace(request, workload=replace(request.workload, precision="bf16"))
    replicas = _search(request, reading, strategies=whole, offload=None, now=now)
    return [*replicas, *_search(mixed, reading, strategies=sharded, offload=None, now=now)]


def _degrees_of(now: Configuration) -> Degrees:
    return Degrees(
        tp=now.tp,
        pp=now.pp,
        cp=now.cp,
        ep=now.ep,
        pp_schedule=now.pp_schedule,
        virtual_stages=now.virtual_stages,
        sequence_parallel=now.sequence_parallel,
    )


def _search(
    request: Request,
    reading: Reading,
    *,
    strategies: tuple[words.Strategy, ...],
    offload: words.Offload | None,
    now: Configuration,
) -> list[Plan]:
    trainer = TRAINERS[reading.format]
    code = code_base(request.workload.code)
    known_here = tuple(name for name in strategies if name in code.strategies)
    kinds = tuple(dict.fromkeys((*(kind for kind in trainer.checkpointings), now.activation_checkpointing)))
    narrowed = replace(
        request,
        strategies=known_here,
        offload=offload,
        checkpointings=kinds,
        degrees=_degrees_of(now),
        allow_unrunnable=True,
        top=_LOOKED_AT,
        zero_backend="deepspeed" if now.backend != "native" else "native",
    )
    try:
        plans = recommend(narrowed).plans
    except ContradictoryRequest:  # the batch cannot be split over the ranks
        return []
    return [item for item in plans if item.configuration.offload in trainer.offloads and not is_last_resort(item)]


_LOOKED_AT = 12
"""Plans of a search, one of each strategy and offload, among which those count that the trainer can run."""
