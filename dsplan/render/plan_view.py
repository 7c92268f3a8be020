"""One plan as text: where the bytes and the seconds go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsplan.render.show import Block, Style, Text
from dsplan.render.table_columns import Bar, Cell, Table, columns
from hardware_db.units import format_bytes, format_count, format_seconds, three_digits, time_unit
from planner.cluster.groups import name_group, name_nodes
from planner.cost.verdict import why_it_misses
from planner.types.plan import Configuration, MemoryEstimate, Plan, StepTime, WorkloadSection
from planner.vocabulary import GENERATING

if TYPE_CHECKING:
    from planner.search.maximum import Maximum
    from planner.search.request import Request

VERDICT_STYLES: dict[str, Style] = {"fits": "good", "tight": "warning", "does_not_fit": "bad"}

_BAR = 30
_WHEN = {
    "load": "once, while the model is placed",
    "forward": "every micro-batch",
    "loss": "every micro-batch",
    "backward": "every micro-batch",
    "step": "every optimizer step",
    "eval": "every evaluation",
    "save": "every checkpoint",
    "generate": "every round",
    "reward": "every round",
    "reference": "every round",
    "logprob": "every round",
    "update": "the most of forward to step",
    "sync": "every round",
}
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries")


def plan_blocks(plan: Plan, taken_for_granted: Sequence[str] = ()) -> list[Block]:
    """Model, hardware and configuration; memory by category and phase; time by part; the verdict."""
    return [*header(plan, taken_for_granted), *figure_blocks(plan)]


def figure_blocks(plan: Plan) -> list[Block]:
    """Return the configuration; memory by category and phase; time by part; the verdict."""
    blocks: list[Block] = [Text(text=describe(plan.configuration))]
    blocks += [memory_table(plan), phase_table(plan), time_table(plan.time), *round_blocks(plan)]
    blocks.append(Text(text=_rates(plan)))
    verdict = verdict_line(plan)
    blocks += [Text(text=f"note: {note}", style="warning") for note in plan.notes if note not in verdict]
    blocks.append(Text(text=f"figures: {_provenance(plan)}", style="faint"))
    return [*blocks, Text(text=verdict, style=VERDICT_STYLES[plan.verdict])]


def header(plan: Plan, taken_for_granted: Sequence[str] = ()) -> list[Block]:
    """Return which model on which hardware, with what nobody asked for."""
    model, cluster = plan.model, plan.cluster
    groups = cluster.get("groups") or []
    kinds = [
        name_nodes(each["device"], each["nodes"], each["gpus_per_node"], each.get("speed", 1.0)) for each in groups
    ]
    nodes = f" on {cluster['nodes']} nodes" if cluster["nodes"] > 1 else ""
    where = " and ".join(kinds) or f"{cluster['gpus']} x {cluster['device']}{nodes}"
    unlike = len({each.get("capacity_bytes") for each in groups}) > 1
    usable = f"{format_bytes(limit_bytes(plan))} usable {'on the smallest' if unlike else 'each'}"
    blocks: list[Block] = [
        Text(text=f"{model['name']}: {format_count(model['parameters'])} parameters", style="heading"),
        Text(text=f"{where}, {usable}"),
    ]
    blocks += [Text(text=text)] if (text := _what_runs(plan)) else []
    assumed = "; ".join(taken_for_granted) or cluster.get("assumed")
    return [*blocks, Text(text=f"assumed: {assumed}", style="warning")] if assumed else blocks


def _what_runs(plan: Plan) -> str:
    """Return whose modules run and how, where that is not what goes without saying."""
    work = plan.workload
    words = [f"code {work['code']}"] if work.get("code", "transformers") != "transformers" else []
    words += ["blocks compiled"] if work.get("compile") else []
    words += [f"loss {work['loss']}"] if work.get("loss", "plain") != "plain" else []
    return ", ".join(words)


def describe(configuration: Configuration) -> str:
    """Return a configuration in one line, for headings."""
    batch = (
        f"micro-batch {configuration.micro_batch_text} x accumulation {configuration.gradient_accumulation_steps}"
        f" = global batch {configuration.global_batch_size}"
    )
    words = [f"{configuration.strategy} ({configuration.backend})", dims_text(configuration), batch]
    words += [] if configuration.counts_samples else [f"sequence {configuration.sequence_length}"]
    words += [configuration.precision, configuration.optimizer]
    words += [configuration.attention, f"checkpointing {recomputation_text(configuration)}"]
    words += [f"offload {offload_text(configuration)}"]
    words += ["activations on the host"] if configuration.activations_on_host else []
    compression = configuration.gradient_compression
    return ", ".join([*words, *([f"gradients in {compression}"] if compression != "none" else [])])


def recomputation_text(configuration: Configuration) -> str:
    """Return what is recomputed, with the modules where they are listed: `selective of moe_act, layernorm`."""
    modules = ", ".join(configuration.recomputed)
    return f"{configuration.activation_checkpointing}{f' of {modules}' if modules else ''}"


def offload_text(configuration: Configuration) -> str:
    """Return what is offloaded, and how much of it where that is not all: `optimizer 50%`."""
    ratio = configuration.offload_ratio
    return configuration.offload if ratio == 1 else f"{configuration.offload} {ratio:.0%}"


def dims_text(configuration: Configuration) -> str:
    """Return the parallel degrees above 1.

    `dp 8`, `dp 2x4 tp 2` (copies x shards), `pp 4x2` (virtual stages), `pp 4 gpipe`, `pp 4 (3x9,1x5)` (blocks of each
    stage), or `1 GPU`.
    """
    copies, shards = configuration.dp_replicate, configuration.dp_shard
    data_parallel = f"{copies}x{shards}" if copies > 1 and shards > 1 else str(copies * shards)
    pieces = f"x{configuration.virtual_stages}" if configuration.virtual_stages > 1 else ""
    # 1F1B is what a pipeline has unless it says so, and several stages a rank are interleaved.
    schedule = f" {configuration.pp_schedule}" if configuration.pp_schedule in ("gpipe", "zero-bubble") else ""
    layers = f" ({configuration.layers_per_stage})" if configuration.layers_per_stage else ""
    degrees = (
        ("tp", configuration.tp, ""),
        ("pp", configuration.pp, pieces + schedule + layers),
        ("cp", configuration.cp, ""),
        ("ep", configuration.ep, ""),
    )
    words = [f"dp {data_parallel}"] if copies * shards > 1 else []
    return " ".join([*words, *(f"{name} {degree}{more}" for name, degree, more in degrees if degree > 1)]) or "1 GPU"


def memory_table(plan: Plan) -> Table:
    """Bytes by category at the peak, then what torch reserves and what the driver shows, against the capacity."""
    memory = plan.memory
    capacity = limit_bytes(plan)
    parts = [(name, getattr(memory, f"{name}_bytes")) for name in _CATEGORIES]
    parts += [("allocated", memory.peak_allocated_bytes), ("reserved", memory.peak_reserved_bytes)]
    parts += [("overhead", memory.device_overhead_bytes), ("used", memory.device_used_bytes)]
    parts += [("needed", memory.device_needed_bytes), ("used at most", memory.device_used_upper_bytes)]
    rows = [_row(name, size / capacity, format_bytes(size)) for name, size in parts]
    title = (
        f"memory of the busiest GPU at its peak ({memory.peak_phase}); a full bar is {format_bytes(capacity)}\n"
        "needed decides; allocated is what torch.cuda.max_memory_allocated() shows, used what nvidia-smi shows"
    )
    return Table(title=title, columns=columns("category", "share", ">size"), rows=rows)


def phase_table(plan: Plan) -> Table:
    """Return the allocated peak of each phase of a step, and the host's memory."""
    capacity = limit_bytes(plan)
    rows = [
        [*_row(phase, size / capacity, format_bytes(size)), _WHEN.get(phase, "")]
        for phase, size in plan.memory.phases.items()
    ]
    sizes = plan.memory.states.items()
    states = ", ".join(f"{format_bytes(size)} {name.removesuffix('_bytes')}" for name, size in sizes)
    title = f"resident states of a rank: {states}\nallocated peak by phase; the host needs {_host(plan.memory)}"
    return Table(title=title, columns=columns("phase", "share", ">size", "?when"), rows=rows)


def time_table(time: StepTime) -> Table:
    """Seconds of one optimizer step by part."""
    hidden = time.communication_seconds - time.exposed_communication_seconds
    parts = (
        ("compute", time.compute_seconds),
        ("communication", time.exposed_communication_seconds),
        ("offload", time.offload_seconds),
        ("optimizer", time.optimizer_seconds),
        ("bubble", time.bubble_seconds),
    )
    rows: list[list[Cell]] = [
        [name, Bar(share=part / time.step_seconds, width=_BAR, of_limit=False), format_seconds(part)]
        for name, part in parts
        if part > 0
    ]
    between = interval_text(time)
    expected = f" ({between})" if between else ""
    took = f"one step takes {format_seconds(time.step_seconds)}{expected}"
    if time.predicted_step_seconds is not None:
        took += f", as measured here; predicted {format_seconds(time.predicted_step_seconds)}"
    title = f"{took}; {format_seconds(hidden)} of communication is hidden"
    return Table(title=title, columns=columns("part", "share", ">time"), rows=rows)


def round_blocks(plan: Plan) -> list[Block]:
    """Return the seconds of a round of generation and training by phase; nothing where nothing is generated."""
    time, work = plan.time, plan.workload
    if not time.phases or time.round_seconds is None:
        return []
    longest = max(time.phases.values())
    rows: list[list[Cell]] = [
        [name, Bar(share=seconds / longest, width=_BAR, of_limit=False), format_seconds(seconds)]
        for name, seconds in time.phases.items()
    ]
    samples = work["prompts_per_step"] * work["generations"]
    steps = max(samples * work["num_iterations"] // plan.configuration.global_batch_size, 1)
    title = (
        f"a round of {work['prompts_per_step']:,} prompts x {work['generations']} completions takes"
        f" {format_seconds(time.round_seconds)}, {steps} optimizer step{'s' * (steps > 1)} of it; generation:"
        f" {rollout_text(work)}"
    )
    if sum(time.phases.values()) > 1.001 * time.round_seconds:
        title += "; generation and training run side by side"
    return [Table(title=title, columns=columns("phase", "share", ">time"), rows=rows)]


def rollout_text(work: WorkloadSection) -> str:
    """Return where a plan generates: `colocate 50%, tp 2, asleep in between`, `8 GPUs, tp 2`, `hf`, or nothing."""
    site = work.get("rollout")
    if site is None or work.get("task") not in GENERATING:
        return ""
    tp = f", tp {work['rollout_tp']}" if work["rollout_tp"] > 1 else ""
    if site == "server":
        count, off = work["rollout_gpus"], f", {work['steps_off']} off" if work["steps_off"] else ""
        return f"{count} GPU{'s' * (count > 1)}{tp}{off}"
    if site == "hf":
        return "hf"
    return f"colocate {work['rollout_memory']:.0%}{tp}{', sleeps' if work['rollout_sleep'] else ''}"


def interval_text(time: StepTime, unit: tuple[str, float] | None = None) -> str:
    """Between which times nine of ten steps should lie, in the step's own unit or in the one given: `1.72-2.21`."""
    if time.step_seconds_low is None or time.step_seconds_high is None:
        return ""
    _, length = unit or time_unit(time.step_seconds)
    return "-".join(three_digits(bound / length) for bound in (time.step_seconds_low, time.step_seconds_high))


def verdict_line(plan: Plan) -> str:
    """Return whether it fits, with the figures that decide it."""
    reason = why_it_misses(plan)
    if reason is not None:
        return f"verdict: does not fit: {reason}"
    memory, have = plan.memory, format_bytes(limit_bytes(plan))
    need = format_bytes(needed_bytes(plan))
    most = format_bytes(memory.device_used_upper_bytes)
    if needed_bytes(plan) > limit_bytes(plan):
        need = f"{format_bytes(memory.device_least_bytes)} without any margin, {need} with all,"
    beyond = f"; nineteen of twenty such runs use less than {most}" if most != need else ""
    return f"verdict: {plan.verdict}: needs {need} of {have} per device{beyond}; limited by {plan.limited_by}"


def needed_bytes(plan: Plan) -> int:
    """Return what a device needs, which decides whether a plan fits."""
    # Plans of earlier releases have the upper bound alone, which was what is needed.
    return plan.memory.device_needed_bytes or plan.memory.device_used_upper_bytes


def shown_unit(plan: Plan) -> str:
    """Return what a rate counts: images or samples where tokens mean nothing to a person."""
    kind = plan.model.get("kind")
    if kind in ("vision", "diffusion"):
        return "images"
    return "samples" if plan.configuration.counts_samples or kind in _IN_SAMPLES else "tokens"


_IN_SAMPLES = ("vision-text", "speech-encoder-decoder")


def shown_rate(plan: Plan) -> float:
    """Return how many of them a GPU does in a second."""
    if shown_unit(plan) == "tokens":
        return plan.throughput.tokens_per_second_per_gpu
    return plan.throughput.samples_per_second / plan.configuration.world_size


def limit_bytes(plan: Plan) -> int:
    """Return what one device may use: its capacity, or less where the user set a limit."""
    capacity = plan.cluster["capacity_bytes"]
    # A GPU that others have filled has none free, and shares of it are still to be shown.
    return max(1, min(capacity, plan.workload.get("max_memory_bytes") or capacity))


def _row(name: str, share: float, figure: str) -> list[Cell]:
    return [name, Bar(share=share, width=_BAR), figure]


def _rates(plan: Plan) -> str:
    rates = plan.throughput
    share = "" if rates.mfu is None else f", {rates.mfu:.1%} of the dense peak"
    unit = shown_unit(plan)
    tokens = f"{rates.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, " if unit == "tokens" else ""
    of_all = "samples" if unit == "tokens" else unit
    return (
        f"throughput: {tokens}{rates.samples_per_second:.3g} {of_all}/s,"
        f" {rates.tflops_per_gpu:.3g} TFLOP/s per GPU{share}"
    )


def _host(memory: MemoryEstimate) -> str:
    need, at_first = memory.host_bytes_per_node, memory.host_load_bytes_per_node
    return f"{format_bytes(need)} per node" + (f" ({format_bytes(at_first)} at first)" if at_first > need else "")


def _provenance(plan: Plan) -> str:
    return ", ".join(f"{group} {source}" for group, source in plan.provenance.items()) or "datasheet"


# The most that fits (`dsplan max`): a row for each way to run.


def maxima_blocks(request: Request, rows: Sequence[Maximum]) -> list[Block]:
    """Model and hardware; the largest micro-batch, sequence and model of each way to run; what each is searched at."""
    from planner.cost.verdict import device_limit
    from planner.search.maximum import SEQUENCE_STEP

    cluster, workload = request.cluster, request.workload
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    where = " and ".join(map(name_group, cluster.groups)) or f"{cluster.gpus} x {cluster.device.name}{nodes}"
    blocks: list[Block] = [
        Text(text=f"{request.facts.name}: {format_count(request.counts.total)} parameters", style="heading"),
        Text(text=f"{where}, {format_bytes(device_limit(workload, cluster))} usable each"),
    ]
    assumed = _assumptions(request)
    blocks += [Text(text=f"assumed: {'; '.join(assumed)}", style="warning")] if assumed else []
    names = columns("strategy", "???degrees", "?recompute", "??offload", ">micro-batch", ">sequence", ">model")
    blocks += [Text(text=""), Table(title="", columns=names, rows=[_maximum_row(row) for row in rows])]
    at = f"{workload.precision}, {workload.optimizer}, {workload.attention} attention"
    blocks.append(Text(text=f"every figure is the largest that fits by itself, as `dsplan estimate` judges it; {at}"))
    blocks.append(Text(text=f"micro-batch: samples of {workload.sequence_length} tokens on each GPU", style="faint"))
    if any(row.sequence_length for row in rows):
        blocks.append(Text(text=f"sequence: tokens of one sample per GPU, in steps of {SEQUENCE_STEP}", style="faint"))
    if any(row.model_size for row in rows):
        text = (
            f"model: a decoder like LLaMA (--model-size), one sample of {workload.sequence_length} tokens on each GPU"
        )
        blocks.append(Text(text=text, style="faint"))
    return [*blocks, *_beyond_positions(request, rows)]


def maxima_to_dict(request: Request, rows: Sequence[Maximum]) -> dict[str, Any]:
    """Return what `max --json` prints.

    `maxima`, a list of one object for each way to run, and what they are searched at.
    """
    from planner.types.job import Job, sections_of

    sections = sections_of(
        Job(
            facts=request.facts,
            counts=request.counts,
            workload=request.workload,
            cluster=request.cluster,
            configuration=rows[0].configuration,
        )
    )
    plain = ("strategy", "backend", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "activation_checkpointing")
    return {
        "schema_version": 1,
        **{name: dict(sections[name]) for name in ("model", "cluster", "workload")},
        "maxima": [
            {
                **{name: getattr(row.configuration, name) for name in (*plain, "offload")},
                "micro_batch_size": row.micro_batch_size,
                "sequence_length": row.sequence_length,
                "model_size": row.model_size,
                "model_parameters": row.model_parameters,
            }
            for row in rows
        ],
        "defaults": _assumptions(request),
    }


def _assumptions(request: Request) -> list[str]:
    """Return what was taken for granted, without the batch, which is what is asked for."""
    return [text for text in request.defaults if "--global-batch" not in text]


def _maximum_row(row: Maximum) -> list[Cell]:
    chosen = row.configuration
    figures = (row.micro_batch_size, row.sequence_length, row.model_size)
    return [
        chosen.strategy,
        dims_text(chosen),
        chosen.activation_checkpointing,
        offload_text(chosen),
        *("-" if figure is None else f"{figure:,}" if isinstance(figure, int) else figure for figure in figures),
    ]


def _beyond_positions(request: Request, rows: Sequence[Maximum]) -> list[Block]:
    positions = request.facts.max_position_embeddings
    longest = max((row.sequence_length or 0 for row in rows), default=0)
    if not positions or longest <= positions or request.facts.learned_positions:
        return []
    text = f"note: {request.facts.name} was made for {positions:,} positions; longer sequences fit, untrained"
    return [Text(text=text, style="warning")]
