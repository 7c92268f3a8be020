"""Abilities of trainers of fine-tuning and post-training, and the settings that say a plan: `trainers.yaml`.

Each trainer's own module makes files of the settings; what a trainer lacks is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.files import read_shipped_yaml
from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.emit.accelerate import require_whole_offload
from planner.emit.common import EmitOptions, every_block, facts_of, is_zero, loaded_by_default, refuse
from planner.models.counting.adapters import linear_modules
from planner.models.counting.count import count_parameters
from planner.types.plan import Plan

Settings = dict[str, Any]
"""Keys of a trainer's config, those of nested mappings joined by dots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer as `trainers.yaml` has it."""

    form: str
    """What its config is called in messages."""
    source: str
    """Repository, commit and files that its keys were read in."""
    strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    keys: Mapping[str, str]
    """Names of a plan's figures."""
    settings: Settings
    """What does not depend on the plan."""
    words: Mapping[str, Mapping[str, Any]]
    """Settings of a plan's words, by field and word."""
    precision: Mapping[str, Mapping[str, Settings]]
    """Settings of a precision, by what holds the weights."""
    degrees: tuple[str, ...] = ()
    """Degrees that it has beside data parallelism."""


@lru_cache(maxsize=1)
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = read_shipped_yaml(Path(__file__).with_suffix(".yaml"))
    return document


@lru_cache(maxsize=16)
def trainer_of(name: str) -> Trainer:
    """Return a trainer by its name in `trainers.yaml`."""
    row = dict(_document()["trainers"][name])
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Trainer(**fields)


def torchtune_models() -> Mapping[str, Mapping[str, Any]]:
    """Return torchtune's builders by the models' names."""
    rows: Mapping[str, Mapping[str, Any]] = _document()["torchtune_models"]
    return rows


def settings_of(plan: Plan, trainer: Trainer, options: EmitOptions) -> Settings:
    """Return the settings that say a plan, but those that spread its states.

    Raises:
        ContradictoryRequest: the trainer has no setting for something of the plan.
    """
    _refuse_what_it_lacks(plan, trainer)
    settings = dict(trainer.settings)
    for field, word in _words_of(plan):
        allowed = trainer.words.get(field, {})
        if word not in allowed:
            raise _refuse_word(plan, trainer, field, word, tuple(allowed))
        settings |= allowed[word]
    settings |= _adapters(plan, trainer)
    settings |= _precision(plan, trainer)
    if plan.workload.get("compile"):
        if "compile" not in trainer.words:
            raise refuse(plan, trainer.form, "with --compile", "plan without --compile")
        settings |= trainer.words["compile"]
    figures = {key: value for field, value in _figures(plan, options) if (key := trainer.keys.get(field))}
    return figures | settings


def nested(settings: Settings) -> Settings:
    """Return settings as nested mappings, parted at the dots of their keys."""
    mapping: Settings = {}
    for key, value in settings.items():
        inner, *rest = key.split(".")
        section = mapping
        for name in rest:
            section = section.setdefault(inner, {})
            inner = name
        section[inner] = value
    return mapping


def task_of(plan: Plan) -> words.Task:
    """Return the plan's task; plans of earlier releases say none for a decoder."""
    return plan.workload.get("task") or "causal-lm"


def _words_of(plan: Plan) -> Iterator[tuple[str, str]]:
    configuration, workload = plan.configuration, plan.workload
    yield "task", task_of(plan)
    yield "method", workload.get("method") or "full"
    yield "optimizer", configuration.optimizer
    yield "attention", configuration.attention
    yield "activation_checkpointing", configuration.activation_checkpointing
    yield "loss", workload.get("loss") or "plain"


_FLAGS = {"activation_checkpointing": "checkpointing"}
_PHRASES = {
    "task": "of task",
    "method": "with method",
    "optimizer": "with optimizer",
    "attention": "with attention",
    "activation_checkpointing": "with checkpointing",
    "loss": "with loss",
}


def _refuse_word(plan: Plan, trainer: Trainer, field: str, word: str, allowed: tuple[str, ...]) -> Exception:
    flag = _FLAGS.get(field, field)
    return refuse(plan, trainer.form, f"{_PHRASES[field]} {word}", f"plan with --{flag} {' or '.join(allowed)}")


def _figures(plan: Plan, options: EmitOptions) -> Iterator[tuple[str, Any]]:
    configuration = plan.configuration
    yield "model", plan.model.get("name")
    yield "sequence_length", configuration.sequence_length
    yield "micro_batch_size", configuration.micro_batch_size
    yield "gradient_accumulation_steps", configuration.gradient_accumulation_steps
    yield "global_batch_size", configuration.global_batch_size
    yield "tp", configuration.tp
    yield "cp", configuration.cp
    yield "learning_rate", options.learning_rate
    yield "weight_decay", options.weight_decay
    yield "gradient_clipping", options.gradient_clipping


def _refuse_what_it_lacks(plan: Plan, trainer: Trainer) -> None:
    configuration, workload, form = plan.configuration, plan.workload, trainer.form
    if plan.cluster.get("vendor") == "cpu":
        raise refuse(plan, form, "for CPU ranks", "it trains on GPUs; use `dsplan run`")
    if configuration.strategy not in trainer.strategies:
        raise refuse(plan, form, "", f"plan with --strategy {' or '.join(trainer.strategies)}")
    if is_zero(plan) and configuration.backend != "deepspeed":
        raise refuse(plan, form, f"with backend {configuration.backend}", "plan with --backend deepspeed")
    for name in ("tp", "pp", "cp", "ep"):
        degree = getattr(configuration, name)
        if degree > 1 and (name not in trainer.degrees or configuration.strategy not in words.FSDP_STRATEGIES):
            raise refuse(plan, form, f"with {name} {degree}", f"plan with --{name} 1")
    if configuration.strategy in ("fsdp", "fsdp-grad-op") and configuration.dp_replicate > 1:
        copies = f"with {configuration.dp_replicate} copies of shards"
        raise refuse(plan, form, copies, "plan with --strategy hsdp, or without --shard")
    if configuration.sequence_parallel and configuration.tp > 1:
        raise refuse(plan, form, "with split sequences between products", "plan with --no-sequence-parallel")
    _refuse_offload(plan, trainer)
    if configuration.activations_on_host:
        raise refuse(plan, form, "with activations on the host", "plan without --activations-on-host")
    if configuration.gradient_compression != "none" and not is_zero(plan):
        compression = f"with gradient compression {configuration.gradient_compression}"
        raise refuse(plan, form, compression, "plan with --gradient-compression none")
    if configuration.activation_checkpointing == "full" and configuration.checkpoint_every > 1:
        raise refuse(plan, form, f"with {every_block(plan)}", "it recomputes all; plan with --checkpoint-every 1")
    for key in ("train_only", "ema"):
        if workload.get(key):
            flag = key.replace("_", "-")
            raise refuse(plan, form, f"with --{flag}", f"plan without --{flag}, which dsplan's own scripts can do")


def _refuse_offload(plan: Plan, trainer: Trainer) -> None:
    configuration = plan.configuration
    if configuration.offload not in trainer.offloads:
        allowed = " or ".join(trainer.offloads)
        raise refuse(plan, trainer.form, f"with offload {configuration.offload}", f"plan with --offload {allowed}")
    if configuration.strategy in words.FSDP_STRATEGIES:
        require_whole_offload(plan, trainer.form)
    elif not is_zero(plan) and configuration.offload != "none":
        raise refuse(plan, trainer.form, f"with offload {configuration.offload}", "choose FSDP or ZeRO")
    if configuration.offload_ratio != 1:
        share = f"with {configuration.offload_ratio:.0%} of its states on the host"
        raise refuse(plan, trainer.form, share, "plan with --offload-ratio 1")


# What is trained, and in which precision.


def _adapters(plan: Plan, trainer: Trainer) -> Settings:
    workload = plan.workload
    method, loaded = workload.get("method") or "full", workload.get("load_dtype")
    in_8_bits = trainer.words.get("load_dtype", {}).get("int8")
    if method in ("lora", "dora") and loaded == "int8" and in_8_bits is not None:
        settings = dict(in_8_bits)
    elif loaded is not None and loaded != loaded_by_default(plan):
        raise refuse(plan, trainer.form, f"with weights loaded as {loaded}", "plan without --load-dtype")
    else:
        settings = {}
    if method == "full":
        return settings
    rank = workload.get("lora_rank")
    settings |= {trainer.keys["lora_rank"]: rank, trainer.keys["lora_alpha"]: 2 * (rank or 0)}
    return settings | _targets(plan, trainer)


def target_modules(plan: Plan, form: str) -> list[str]:
    """Return the names of the linear layers that adapters are put beside, as PEFT's lists take them.

    Raises:
        ContradictoryRequest: the targets are a pattern, or nothing is known of the model's layers.
    """
    targets = str(plan.workload.get("lora_targets"))
    if targets in ("attention", "all-linear"):
        facts = facts_of(plan, form)
        return linear_modules(facts, count_parameters(facts), targets)
    if not re.fullmatch(r"[\w., ]+", targets):
        raise refuse(
            plan, form, f"with adapters by the pattern {targets!r}", "name layers: --lora-targets q_proj,v_proj"
        )
    return [part.strip() for part in targets.split(",") if part.strip()]


def _targets(plan: Plan, trainer: Trainer) -> Settings:
    spelling = trainer.words.get("targets")
    if spelling is None:  # torchtune has flags of its own
        return {}
    if plan.workload.get("lora_targets") == "all-linear":
        every: Settings = spelling["all-linear"]
        return dict(every)
    modules = target_modules(plan, trainer.form)
    return {spelling["other"]: ",".join(modules) if spelling.get("joined") else modules}


def _precision(plan: Plan, trainer: Trainer) -> Settings:
    configuration = plan.configuration
    is_full = (plan.workload.get("method") or "full") == "full"
    holder = "replicas" if is_full else "adapters"
    if is_zero(plan):
        holder = "zero"
    elif configuration.strategy in words.FSDP_STRATEGIES:
        holder = "fsdp"
    allowed = trainer.precision.get(holder, {})
    if configuration.precision not in allowed:
        remedy = f"plan with --precision {' or '.join(allowed)}"
        raise refuse(plan, trainer.form, f"in {configuration.precision}", remedy)
    return dict(allowed[configuration.precision])
