"""Planning inside the ranks of a script that does not call dsplan: from the model it just made, on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardware_db.measurement import RateMeasurement
from hardware_db.notices import notice
from planner import vocabulary as words
from planner.cluster.resolve import probed_cluster
from planner.errors import DsplanError, NothingFits
from planner.models.counting.adapters import with_adapters
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts, ParameterCounts
from planner.models.tasks import possible_tasks
from planner.search.request import WorkOptions, make_request, why_not_deepspeed
from planner.search.space import enumerate_candidates
from planner.types.plan import Plan
from planner.types.plan_io import load_plan, plan_to_dict
from strategies.autoplan.fallback import best_plan
from strategies.autoplan.live import machine_rates, with_measured_rates
from strategies.autoplan.select import why_unfit
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.rank_check import require_same_model
from strategies.errors import CannotRun
from strategies.launch.hooks import capabilities
from strategies.launch.hooks.trl import TrlWork
from strategies.modules.adapters import TrainingMethod, method_of
from strategies.run_directory import claim
from strategies.run_directory.machine import own_machine
from strategies.run_directory.request import plan_request
from strategies.run_directory.spec import ScriptKind
from strategies.run_directory.state_consensus import current
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import first_samples, longest_tokens
from strategies.tracing.live import counts_from_module, facts_from_module, facts_of_config
from strategies.tracing.module_trace import traced_request, work_of
from strategies.variables import RUN_DIRECTORY

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveJob:
    """A script's own settings at the moment its model is known.

    The global batch they make is kept. With `fixed_batch` the micro-batch is kept as well, because the script cuts it;
    one that does not accumulate trains on as many samples a step as its ranks have in a micro-batch.

    `example` is a batch of the script's, of any number of samples, as the module is called with it: a mapping, a
    sequence, one tensor, or `(args, kwargs)`; what the module does not take, such as labels, may be in it. A module
    that no catalogue knows is traced with it. `sequence_length` is tokens per sample; without it the example's token
    ids count, and a sample of an example that has none is one position long. `post_training` is what a trainer of TRL's
    does beside a model's usual task.
    """

    module: nn.Module
    kind: ScriptKind
    micro_batch_size: int
    gradient_accumulation_steps: int
    sequence_length: int | None = None
    precision: words.Precision
    optimizer: words.Optimizer
    example: Any = None
    fixed_batch: bool = False
    accumulates: bool = True
    post_training: TrlWork | None = None


def load_given_plan(kind: ScriptKind) -> Plan | None:
    """Return the plan that a run resumes with, else that of `dsplan run --plan`, or None if ranks plan themselves.

    Raises:
        CannotRun: a script of this kind cannot run it.
    """
    plan = _settled()
    if plan is not None:
        capabilities.require_plan(kind, plan, gpus=torch.cuda.is_available())
    return plan


def _settled() -> Plan | None:
    state = current()
    if state.plan is not None:
        return state.plan
    path = plan_request().plan_file
    if not path:
        return None
    plan = load_plan(path)
    if state.chooses_anew and (why := why_unfit(plan, state)):
        say(f"{path} {why}: another plan is made")
        return None
    return plan


def sequence_length(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> int | None:
    """Return the tokens per sample: the longest of the first samples, padded by the script's collator where it has one.

    Data without token ids has no such length (None); `example_batch` makes of it what is planned for.
    """
    samples = first_samples(dataset)
    batch = None
    if collate is not None and samples:
        try:
            batch = collate(samples)
        except Exception:
            # The script's own code, which may raise anything: Trainer drops columns of samples before it collates them.
            _LOG.debug("the collator fails on the first samples, whose own lengths count", exc_info=True)
    if batch is None:
        return max(map(longest_tokens, samples), default=0) or None
    return -(-longest_tokens(batch) // _samples_in_a_row(batch, len(samples))) or None


def _samples_in_a_row(batch: Any, samples: int) -> int:
    """Return 1 for a collator that pads; all samples for one that packs, which puts them behind each other."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return samples if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1 else 1


@claim.own_work()
def plan_live(job: LiveJob) -> Plan | None:
    """Plan for a script's model on this machine, the same on every rank; every rank must call this together.

    None where there is nothing to plan from and nothing was asked for: the script then runs as it is, and rank 0 says
    why.

    Raises:
        DsplanError: the model differs between ranks, nothing fits, or what was asked for cannot be planned; the same on
            every rank.
    """
    gpus = torch.cuda.is_available()
    capabilities.require_possible(job.kind, plan_request().strategy, gpus=gpus)
    require_same_model(job.module)
    measured = machine_rates(own_device())
    return on_rank_zero(lambda: _plan_if_possible(job, measured))


def _plan_if_possible(job: LiveJob, measured: Sequence[RateMeasurement]) -> Plan | None:
    if capabilities.requested_flags() or current().is_resumed:
        return _plan(job, measured)
    if job.sequence_length is None and job.example is None and job.post_training is None:
        say("no plan: the script has shown no data to plan for; it runs as it is, measured")
        return None
    try:
        return _plan(job, measured)
    except NothingFits:
        raise
    except DsplanError as problem:
        say(f"no plan: {problem}; the script runs as it is, measured")
        return None


def _plan(job: LiveJob, measured: Sequence[RateMeasurement]) -> Plan:
    ranks = int(os.environ["WORLD_SIZE"])
    cluster = probed_cluster(own_machine(), ranks=ranks)
    facts, adapters = facts_of(job.module, job.precision)
    task, length = work_of(facts, job.module, job.example, _longest(job, facts))
    options = WorkOptions(
        task=task,
        seq_len=length,
        global_batch=_global_batch(job, ranks),
        precision=job.precision,
        optimizer=job.optimizer,
        **adapters,
    )
    options = _with_post_training(options, job, facts, ranks)
    gpus = torch.cuda.is_available()
    chosen, runnable = plan_request().strategy, capabilities.runnable_strategies(job.kind, gpus=gpus)
    zero = capabilities.choose_zero_backend(job.kind, gpus=gpus)
    if zero == "deepspeed" and (lacks := why_not_deepspeed(cluster.device, job.precision)):
        if chosen in words.ZERO_STAGES:
            raise CannotRun(f"{lacks}; train in fp32 or bf16, or choose ddp")
        runnable = tuple(name for name in runnable if name not in words.ZERO_STAGES)
    strategies = tuple(name for name in runnable if chosen in (None, name))
    request = make_request(facts, cluster, options, strategies=strategies, top=1, zero_backend=zero)
    request = traced_request(replace(request, splits=()), job.module, job.example)  # such scripts train whole models
    if job.fixed_batch or (job.post_training is not None and job.post_training.keeps_micro_batch):
        request = replace(request, micro_batch=job.micro_batch_size)
    if current().chooses_anew and not any(True for _ in enumerate_candidates(request)):
        request = replace(request, strategies=runnable)
    return best_plan(with_measured_rates(request, measured))


def facts_of(module: nn.Module, precision: words.Precision) -> tuple[ModelFacts, dict[str, Any]]:
    """Return a model's facts, and the options that say which adapters of PEFT's are beside its weights.

    Adapters that no option says, that are counted otherwise, or whose 16-bit base is trained without autocast, leave
    the model as one that is known from a trace.
    """
    method = method_of(module)
    base = getattr(module, "get_base_model", lambda: module)()
    facts = None if method is None else facts_of_config(base)
    is_narrow = precision == "fp32" and method is not None and method.load_dtype != "fp32"
    if method is None or facts is None or is_narrow:
        return facts_from_module(module), {}
    if _counted(facts, method) != _counts(counts_from_module(module)):
        return facts_from_module(module), {}
    return facts, {**method.in_a_plan, "load_dtype": method.load_dtype}


def _counted(facts: ModelFacts, method: TrainingMethod) -> tuple[int, int] | None:
    has_magnitude = method.method == "dora"
    try:
        counts = with_adapters(
            facts, count_parameters(facts), rank=method.rank, targets=method.targets, magnitude=has_magnitude
        )
    except DsplanError:
        return None
    return _counts(counts)


def _counts(counts: ParameterCounts) -> tuple[int, int]:
    return counts.total, counts.trained.total


def _with_post_training(options: WorkOptions, job: LiveJob, facts: ModelFacts, ranks: int) -> WorkOptions:
    """Return the options with the task of TRL's trainer, where such a model can have it, and with its rounds."""
    work = job.post_training
    if work is None or work.task is None or work.task not in possible_tasks(facts):
        return options
    rounds: dict[str, Any] = dict(work.options)
    if work.task in words.GENERATING:
        # A sample is its prompt and its completion, whatever the data is long.
        options = replace(options, seq_len=None)
        if work.steps_per_generation is not None:
            samples = work.steps_per_generation * job.micro_batch_size * ranks
            rounds["prompts_per_step"] = max(samples // rounds["generations"], 1)
    return replace(options, task=work.task, **rounds)


def _longest(job: LiveJob, facts: ModelFacts) -> int | None:
    """Return the tokens of a sample; where no data is shown yet the model's positions, which is said."""
    if job.sequence_length is not None or job.example is not None or not facts.max_position_embeddings:
        return job.sequence_length
    say(f"no data is shown before the first step: planned for {facts.max_position_embeddings} tokens, the model's most")
    return facts.max_position_embeddings


def _global_batch(job: LiveJob, ranks: int) -> int:
    """Return what the script's settings make, or, in a resumed run, its batch so far if the script can keep it."""
    own, whole = job.micro_batch_size * job.gradient_accumulation_steps * ranks, current().global_batch_size
    if whole is None or job.accumulates:
        return whole or own
    if own != whole:
        say(f"the script does not accumulate gradients: {ranks} ranks train on {own} samples a step, not on {whole}")
    return own


def watch(plan: Plan | None, *, planned: bool, device: torch.device) -> RunMonitor:
    """Return a monitor that writes this rank's metrics; from here on who claimed the run measures it.

    It begins with the plan where that was made here.
    """
    monitor = RunMonitor(
        Path(os.environ[RUN_DIRECTORY]),
        rank=int(os.environ["RANK"]),
        device=device,
        sequence_length=0 if plan is None else plan.configuration.sequence_length,
    )
    claim.take_over(is_planned=plan is not None)
    state = current()
    is_new = planned or (plan is state.plan and not state.is_given)
    if state.tunes:
        say("--tune is for scripts that call dsplan.initialize: nothing is tuned here")
    if plan is not None and is_new and os.environ["LOCAL_RANK"] == "0":
        monitor.plan_made(plan_to_dict(plan))
    return monitor


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


# Messages of a hook, printed once, by rank 0.


def say(sentence: str) -> None:
    """Print a line on rank 0."""
    notice(sentence, stream="stdout", rank_zero=True)


def say_replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Name every setting of the script that the plan changed; nothing where it changed none."""
    changed = [
        f"{name} {_short(before.get(name))} -> {_short(value)}"
        for name, value in after.items()
        if before.get(name) != value and not (_is_off(before.get(name)) and _is_off(value))
    ]
    if changed:
        say("the plan replaces " + ", ".join(changed))


def _is_off(value: Any) -> bool:
    return not value or value == "no"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        stage = value.get("stage", value.get("zero_optimization", {}).get("stage"))
        return f"stage {stage}" if stage is not None else "{...}"
    return "unset" if value is None else str(value)
