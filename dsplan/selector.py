"""HardwareSelector: hardware and a training configuration for a model, in one call from a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dsplan.exact.factory import any_model
from dsplan.training_config import Answer, TrainingConfig, distributed_strategy, estimated_memory
from hardware_db.records import dataclass
from hardware_db.units import GB, format_bytes, format_seconds
from planner import vocabulary as words
from planner.cluster.nodes import usual_gpus_per_node
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.inference import VALUE_BYTES, Serving, possible_counts, serving_on
from planner.errors import ContradictoryRequest, NothingFits, UnknownName
from planner.models.facts import ModelFacts
from planner.models.tasks import default_sequence_length
from planner.search.request import SAMPLES_PER_GPU, WorkOptions, make_request, usual_precision
from planner.search.search import Recommendation, describe, recommend
from planner.types.cluster import Cluster
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict

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
    ) -> Answer:
        """Hardware and strategy for a task.

        `primary_recommendation`, `distributed_strategy`, `gpu_count`, `fallback_options` (the next plans, best first),
        `explanation`, `assumed` and `plan`.

        `task_type` "training": `batch_size` is per GPU (8 if None). "inference": the fewest of at most `gpu_count` GPUs
        that serve `batch_size` (1) sequences at a time, each as long as `sequence_length` or the model allows.
        `gpu_count` 0, as torch counts on a machine without GPUs, is one process on its CPU; without `distributed` one
        GPU is planned for.

        Raises:
            ContradictoryRequest: there is no such task, or a number or a combination is impossible.
            UnknownName: the family, model or device is not known.
            NothingFits: no plan fits; the message holds the closest miss and the remedies.
        """
        if task_type not in ("training", "inference"):
            raise ContradictoryRequest(f"task_type {task_type!r} cannot be planned for; use 'training' or 'inference'")
        if not distributed and gpu_count not in (None, 0, 1):
            raise ContradictoryRequest(f"gpu_count is {gpu_count} but distributed is False; drop one of the two")
        job = _Job(
            model_family=model_family,
            model_name=model_name,
            gpu_count=gpu_count if distributed or gpu_count == 0 else 1,
            batch_size=batch_size,
        )
        if task_type == "inference":
            return self._plan_serving(job)
        answer, plans = self._plans(job)
        return Answer(
            {
                "primary_recommendation": _hardware(plans[0]),
                "distributed_strategy": distributed_strategy(plans[0]),
                "strategy": plans[0].configuration.strategy,
                "gpu_count": plans[0].configuration.world_size,
                "fallback_options": [_option(plan) for plan in plans[1:]],
                "explanation": _explanation(plans, answer),
                "assumed": "; ".join(answer.request.defaults),
                "plan": plan_to_dict(plans[0]),
            },
            plans[0],
        )

    def get_distributed_training_config(
        self,
        model_family: str | None,
        model_name: str,
        gpu_count: int | None = None,
        batch_size: int | None = None,
        max_memory_gb: float | None = None,
    ) -> TrainingConfig:
        """Return the best plan as a mapping.

        `batch_size` is per GPU (8 if None): the global batch is it times `gpu_count`, whatever micro-batch and
        accumulation are chosen. `max_memory_gb` caps each GPU (1e9 bytes).

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
        """Return the recommendation and those of its plans that scripts can follow, best first, at least one."""
        facts, cluster = self._resolve(job)
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
            raise NothingFits(answer.no_plan().sentence)
        return answer, plans

    def _resolve(self, job: _Job) -> tuple[ModelFacts, Cluster]:
        """Return the model and the hardware that a question is about."""
        _check_count("gpu_count", job.gpu_count, least=0)
        _check_count("batch_size", job.batch_size)
        facts = any_model(job.model_name)
        _check_family(job.model_family, facts)
        gpu, gpus = self._gpu, job.gpu_count
        if gpus == 0:
            if gpu not in (None, "cpu") or self._node_type is not None:
                raise ContradictoryRequest(f"gpu_count is 0 and {gpu or self._node_type} is named; drop one of the two")
            gpu, gpus = "cpu", 1
        hardware = HardwareRequest(gpus=gpus, gpu=gpu, node_type=self._node_type, memory_gb=job.max_memory_gb)
        return facts, resolve_cluster(hardware, self._machine)

    def _plan_serving(self, job: _Job) -> Answer:
        """Return how many GPUs serve a model, and what they hold."""
        facts, cluster = self._resolve(job)
        most = cluster.gpus
        if job.gpu_count is None and not cluster.probed:
            most = max(most, usual_gpus_per_node(cluster.device))
        precision = self._precision or usual_precision(cluster.device)
        tokens, assumed = _longest(facts, self._sequence_length)
        ways = [
            serving_on(
                facts,
                gpus,
                capacity_bytes=cluster.capacity_bytes,
                tokens=tokens,
                sequences=job.batch_size or 1,
                bytes_per_value=VALUE_BYTES[precision],
            )
            for gpus in possible_counts(facts, max(most, facts.num_heads))
        ]
        device = cluster.device.name
        fitting = [serving for serving in ways if serving.fits]
        within = [serving for serving in fitting if serving.gpus <= most]
        if not within:
            raise NothingFits(_cannot_serve(facts.name, ways, fitting, most=most, device=device))
        first, *others = (_describe_serving(serving, device) for serving in within)
        return Answer(
            {
                **first,
                "primary_recommendation": first["hardware"],
                "hardware": device,
                "fallback_options": others,
                "sequence_length": tokens,
                "precision": precision,
                "explanation": _explain_serving(within[0], device, tokens),
                "assumed": "; ".join(part for part in (cluster.assumed, assumed) if part),
                "model_family": job.model_family,
                "model_name": job.model_name,
            }
        )


def _longest(facts: ModelFacts, requested: int | None) -> tuple[int, str]:
    """Tokens of a sequence with its answer, and the sentence that says where they come from."""
    longest = facts.max_position_embeddings
    if requested is not None and longest and requested > longest and facts.learned_positions:
        raise ContradictoryRequest(
            f"sequence_length is {requested}, and {facts.name} has {longest} learned positions; use at most {longest}"
        )
    if requested is not None:
        return requested, ""
    tokens = longest or default_sequence_length(facts)
    return tokens, f"sequence length {tokens} (sequence_length=)"


def _describe_serving(serving: Serving, device: str) -> dict[str, Any]:
    return {
        "hardware": f"{serving.gpus} x {device}",
        "distributed_strategy": "TensorParallel" if serving.gpus > 1 else "single",
        "gpu_count": serving.gpus,
        "batch_size": serving.sequences,
        "most_sequences": serving.most_sequences,
        "estimated_memory": {
            "parameters_gb": serving.weights_bytes / GB,
            "kv_cache_gb": serving.cache_bytes / GB,
            "kv_cache_per_sequence_gb": serving.cache_bytes_per_sequence / GB,
            "per_gpu_gb": serving.used_bytes / GB,
            "usable_gb": serving.usable_bytes / GB,
        },
    }


def _explain_serving(serving: Serving, device: str, tokens: int) -> str:
    holds = f"each of {serving.gpus} x {device} holds {format_bytes(serving.weights_bytes)} of weights"
    if serving.most_sequences is None:
        return f"{holds}; sequences leave no keys and values behind."
    cache = f"{format_bytes(serving.cache_bytes)} of keys and values of {serving.sequences} x {tokens} tokens"
    return f"{holds} and {cache}; there is room for {serving.most_sequences} x {tokens}."


def _cannot_serve(model: str, ways: Sequence[Serving], fitting: Sequence[Serving], *, most: int, device: str) -> str:
    closest = next(serving for serving in reversed(ways) if serving.gpus <= most)
    remedies = [f"use {fitting[0].gpus} GPUs"] if fitting else []
    if closest.most_sequences:
        remedies.append(f"serve {closest.most_sequences} sequences at a time")
    remedies.append("set sequence_length= lower, or choose a larger GPU")
    numbered = " ".join(f"{number}) {remedy}" for number, remedy in enumerate(remedies, start=1))
    return (
        f"{model} cannot be served by {most} x {device}: each of {closest.gpus} would hold"
        f" {format_bytes(closest.weights_bytes)} of weights and {format_bytes(closest.cache_bytes)} of keys and values,"
        f" and has {format_bytes(closest.usable_bytes)} for them; {numbered}"
    )


def _check_count(name: str, count: object, *, least: int = 1) -> None:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < least):
        raise ContradictoryRequest(f"{name} is {count!r}; it must be a whole number of at least {least}, or None")


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
    """Return why the first plan is first, in sentences."""
    first = plans[0]
    used, upper = format_bytes(first.memory.device_used_bytes), format_bytes(first.memory.device_used_upper_bytes)
    sentences = [
        f"{describe(first)}: {format_seconds(first.time.step_seconds)} per step, limited by {first.limited_by},"
        f" {used} per GPU (at most {upper})"
    ]
    sentences += [answer.choice, *(f"{item.strategy}: {item.reason}" for item in answer.rejected)]
    return ". ".join(sentences) + "."
