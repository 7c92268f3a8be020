"""HardwareSelector: hardware and a training configuration for a model, in one call from a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dsplan.training_config import TrainingConfig, distributed_strategy, estimated_memory
from hardware_db.units import format_bytes, format_seconds
from planner import vocabulary as words
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest, NothingFits, UnknownName
from planner.models.facts import ModelFacts
from planner.search.request import SAMPLES_PER_GPU, WorkOptions, make_request
from planner.search.search import Recommendation, describe, recommend
from planner.types.plan import Plan
from strategies.tracing.factory import any_model

if TYPE_CHECKING:
    from hardware_db.probe import Machine

MODEL_FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text_generation": ("decoder", "custom"),
        "text_classification": ("encoder", "decoder", "encoder-decoder"),
        "embedding": ("encoder", "decoder"),
        "text_to_text": ("encoder-decoder",),
        "vision": ("vision",),
        "audio": ("speech-encoder-decoder",),
        "multimodal": ("vision-language", "vision-text"),
    }
)
"""The families a model may be said to be of, and the kinds of architecture that belong to each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One question to the selector. `batch_size` is samples per GPU and optimizer step."""

    model_family: str | None
    model_name: str
    gpu_count: int | None
    batch_size: int | None
    max_memory_gb: float | None = None


class HardwareSelector:
    """Chooses for the probed machine, or for the `gpu` or `node_type` named (`dsplan devices` lists them).

    Where no GPU is named and none is found, answers say in `assumed` which was taken. `precision` None takes bf16 where
    the device has it, `sequence_length` None the model's usual one.
    """

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        gpu: str | None = None,
        node_type: str | None = None,
        precision: words.Precision | None = None,
        optimizer: words.Optimizer = "adamw",
        sequence_length: int | None = None,
    ) -> None:
        self._machine = machine
        self._gpu = gpu
        self._node_type = node_type
        self._precision = precision
        self._optimizer = optimizer
        self._sequence_length = sequence_length

    def select_hardware_for_task(
        self,
        model_family: str | None,
        model_name: str,
        task_type: str = "training",
        batch_size: int | None = None,
        distributed: bool = True,
        gpu_count: int | None = None,
    ) -> Mapping[str, Any]:
        """Hardware and strategy for a task: `primary_recommendation`, `distributed_strategy`, `gpu_count`,
        `fallback_options` (the next plans, best first), `explanation`, `assumed` and `plan`.

        `batch_size` is per GPU (8 if None); without `distributed` one GPU is planned for.

        Raises:
            ContradictoryRequest: `task_type` is not training, or a number or a combination is impossible.
            UnknownName: the family, model or device is not known.
            NothingFits: no plan fits; the message holds the closest miss and the remedies.
        """
        if task_type != "training":
            raise ContradictoryRequest(f"task_type {task_type!r} cannot be planned for; use 'training'")
        if not distributed and gpu_count not in (None, 1):
            raise ContradictoryRequest(f"gpu_count is {gpu_count} but distributed is False; drop one of the two")
        job = _Job(
            model_family=model_family,
            model_name=model_name,
            gpu_count=gpu_count if distributed else 1,
            batch_size=batch_size,
        )
        answer, plans = self._plans(job)
        return MappingProxyType(
            {
                "primary_recommendation": _hardware(plans[0]),
                "distributed_strategy": distributed_strategy(plans[0]),
                "strategy": plans[0].configuration.strategy,
                "gpu_count": plans[0].configuration.world_size,
                "fallback_options": [_option(plan) for plan in plans[1:]],
                "explanation": _explanation(plans, answer),
                "assumed": "; ".join(answer.request.defaults),
                "plan": plans[0],
            }
        )

    def get_distributed_training_config(
        self,
        model_family: str | None,
        model_name: str,
        gpu_count: int | None = None,
        batch_size: int | None = None,
        max_memory_gb: float | None = None,
    ) -> TrainingConfig:
        """The best plan as a mapping. `batch_size` is per GPU (8 if None): the global batch is it times `gpu_count`,
        whatever micro-batch and accumulation are chosen. `max_memory_gb` caps each GPU (1e9 bytes).

        Raises:
            ContradictoryRequest: a number or a combination is impossible.
            UnknownName: the family, model or device is not known.
            NothingFits: no plan fits; the message holds the closest miss and the remedies.
        """
        job = _Job(
            model_family=model_family,
            model_name=model_name,
            gpu_count=gpu_count,
            batch_size=batch_size,
            max_memory_gb=max_memory_gb,
        )
        answer, plans = self._plans(job)
        return TrainingConfig(
            plans[0],
            model_family=model_family,
            model_name=model_name,
            explanation=_explanation(plans, answer),
            assumed="; ".join(answer.request.defaults),
        )

    def _plans(self, job: _Job) -> tuple[Recommendation, tuple[Plan, ...]]:
        """The recommendation and those of its plans that scripts can follow, best first, at least one."""
        _check_count("gpu_count", job.gpu_count)
        _check_count("batch_size", job.batch_size)
        facts = any_model(job.model_name)
        _check_family(job.model_family, facts)
        hardware = HardwareRequest(
            gpus=job.gpu_count, gpu=self._gpu, node_type=self._node_type, memory_gb=job.max_memory_gb
        )
        cluster = resolve_cluster(hardware, self._machine)
        work = WorkOptions(
            task="seq-cls" if job.model_family == "text_classification" else None,
            seq_len=self._sequence_length,
            global_batch=(job.batch_size or SAMPLES_PER_GPU) * cluster.gpus,
            precision=self._precision,
            optimizer=self._optimizer,
            max_memory_gb=job.max_memory_gb,
        )
        answer = recommend(make_request(facts, cluster, work))
        plans = tuple(plan for plan in answer.plans if plan.runnable)
        if not plans:
            raise NothingFits(_nothing_fits(answer, facts.name))
        return answer, plans


def _check_count(name: str, count: object) -> None:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ContradictoryRequest(f"{name} is {count!r}; it must be a whole number of at least 1, or None")


def _check_family(family: str | None, facts: ModelFacts) -> None:
    if family is None:
        return
    if family not in MODEL_FAMILIES:
        raise UnknownName("model family", family, MODEL_FAMILIES, hint=f"one of {', '.join(MODEL_FAMILIES)}")
    if facts.kind not in MODEL_FAMILIES[family]:
        own = [name for name, kinds in MODEL_FAMILIES.items() if facts.kind in kinds]
        raise ContradictoryRequest(
            f"{facts.name} is a {facts.kind} model, not of family {family}; use {' or '.join(own) or None}"
        )


def _hardware(plan: Plan) -> str:
    return f"{plan.configuration.world_size} x {plan.cluster['device']}"


def _option(plan: Plan) -> dict[str, Any]:
    return {
        "hardware": _hardware(plan),
        "distributed_strategy": distributed_strategy(plan),
        "strategy": describe(plan),
        "gpu_count": plan.configuration.world_size,
        "per_gpu_batch_size": plan.configuration.micro_batch_size,
        "gradient_accumulation_steps": plan.configuration.gradient_accumulation_steps,
        "per_gpu_gb": estimated_memory(plan)["per_gpu_gb"],
        "step_seconds": plan.time.step_seconds,
    }


def _explanation(plans: tuple[Plan, ...], answer: Recommendation) -> str:
    """Why the first plan is first, in sentences."""
    first = plans[0]
    used, upper = format_bytes(first.memory.device_used_bytes), format_bytes(first.memory.device_used_upper_bytes)
    sentences = [
        f"{describe(first)}: {format_seconds(first.time.step_seconds)} per step, limited by {first.limited_by},"
        f" {used} per GPU (at most {upper})"
    ]
    sentences += [answer.choice, *(f"{item.strategy}: {item.reason}" for item in answer.rejected)]
    return ". ".join(sentences) + "."


def _nothing_fits(answer: Recommendation, model: str) -> str:
    cluster = answer.request.cluster
    closest = answer.closest or answer.plans[0]
    reason = closest.notes[0] if closest.notes else closest.verdict
    remedies = [f"{number}) {item.change}" for number, item in enumerate(answer.remedies, start=1)]
    return (
        f"{model} does not fit on {cluster.gpus} x {cluster.device.name}: closest is {describe(closest)}, {reason};"
        f" {' '.join(remedies) or 'use more GPUs'}"
    )
