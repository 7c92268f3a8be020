"""TrainingCase: one short training run that a benchmark makes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsplan.exact.factory import any_model
from planner import vocabulary as words
from planner.models.facts import ModelFacts
from planner.models.from_hf.config import facts_from_config
from planner.models.tasks import default_sequence_length, default_task
from planner.search.estimate import price, why_impossible
from planner.search.request import Request, WorkOptions, make_request
from planner.types.cluster import Cluster
from planner.types.plan import Configuration
from planner.vocabulary import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """One training run of a model."""

    model: str
    task: Task
    configuration: Configuration
    config: Mapping[str, Any] = field(default_factory=dict)
    """The transformers config of the model with its `model_type`; empty for a model that dsplan knows by name."""

    @property
    def ranks(self) -> int:
        """Processes that the run takes."""
        return self.configuration.world_size

    @property
    def needs_deepspeed(self) -> bool:
        """True if DeepSpeed runs it, in processes of its own."""
        return self.configuration.backend == "deepspeed"

    @property
    def facts(self) -> ModelFacts:
        """The model as the planner knows it.

        Raises:
            DsplanError: nothing is known by its name.
        """
        return facts_from_config(self.config, self.model) if self.config else any_model(self.model)

    def __str__(self) -> str:
        chosen = self.configuration
        ours = " (native)" if chosen.backend == "native" else ""
        parts = [f"{self.model}: {chosen.strategy}{ours} on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"]
        parts.append(f"micro-batch {chosen.micro_batch_size} x {chosen.sequence_length}, {chosen.precision}")
        parts += [f"offload {chosen.offload}"] if chosen.offload != "none" else []
        parts += ["checkpointing"] if chosen.activation_checkpointing != "none" else []
        return ", ".join(parts)


# The training runs that say most about a machine: every strategy, on small models or the requested one.
_LLAMA_SMALL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
_GPT2_WIDE: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 8192,
    "n_positions": 1024,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_LLAMA_GPU: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    strategy: words.Strategy
    offload: words.Offload = "none"
    checkpointing: words.Checkpointing = "none"


_SEVERAL = tuple(_Variant(strategy=strategy) for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"))
_ALONE = (_Variant(strategy="single"),)
# One GPU can also trade time for memory; a CPU has nothing to offload from.
_ALONE_ON_GPU = (
    *_ALONE,
    _Variant(strategy="single", checkpointing="full"),
    _Variant(strategy="zero2", offload="optimizer"),
    _Variant(strategy="zero3", offload="all"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A model with the batch it is trained on, and the variants for one rank and for several."""

    name: str
    length: int
    micro_batch: int
    config: Mapping[str, Any]
    """Empty for a model that is known by name."""
    alone: tuple[_Variant, ...] = _ALONE
    several: tuple[_Variant, ...] = _SEVERAL


# One run where products dominate and one where the ranks have more to say to each other than to compute.
_CPU_SAMPLES = (
    _Sample(name="bench-llama-5m", length=128, micro_batch=4, config=_LLAMA_SMALL),
    _Sample(
        name="bench-gpt2-14m",
        length=64,
        micro_batch=1,
        config=_GPT2_WIDE,
        several=tuple(variant for variant in _SEVERAL if variant.strategy in ("ddp", "fsdp", "zero3")),
    ),
)
_GPU_SAMPLES = tuple(
    _Sample(name="bench-llama-250m", length=1024, micro_batch=micro, config=_LLAMA_GPU, alone=_ALONE_ON_GPU)
    for micro in (8, 1)
)


def training_cases(
    cluster: Cluster, model: ModelFacts | None = None, zero_backend: words.Backend = "deepspeed"
) -> Iterator[TrainingCase]:
    """Yield runs that fit the node `cluster`, on as many ranks as it has devices; of `model` alone if one is given."""
    for sample in _samples(cluster, model):
        for variant in sample.several if cluster.gpus > 1 else sample.alone:
            case = _case(sample, variant, cluster, zero_backend)
            request = request_of(case, cluster)
            if why_impossible(request, case.configuration):
                continue
            if price(request, case.configuration).judgement.keeps_margins:
                yield case


def request_of(case: TrainingCase, cluster: Cluster) -> Request:
    """Return the case as a question to the planner."""
    chosen = case.configuration
    options = WorkOptions(
        task=case.task,
        seq_len=chosen.sequence_length,
        global_batch=chosen.global_batch_size,
        precision=chosen.precision,
        optimizer=chosen.optimizer,
        attention=chosen.attention,
    )
    return make_request(case.facts, cluster, options)


def _samples(cluster: Cluster, model: ModelFacts | None) -> tuple[_Sample, ...]:
    on_cpu = cluster.device.is_cpu
    if model is None:
        return _CPU_SAMPLES if on_cpu else _GPU_SAMPLES
    length = min(default_sequence_length(model), 128 if on_cpu else 1024)
    alone = _ALONE if on_cpu else _ALONE_ON_GPU
    return tuple(_Sample(name=model.name, length=length, micro_batch=micro, config={}, alone=alone) for micro in (1, 4))


def _case(sample: _Sample, variant: _Variant, cluster: Cluster, zero_backend: words.Backend) -> TrainingCase:
    ranks = cluster.gpus
    replicated = variant.strategy in ("single", "ddp")
    configuration = Configuration(
        strategy=variant.strategy,
        backend=zero_backend if variant.strategy in words.ZERO_STAGES else "torch",
        dp_replicate=ranks if replicated else 1,
        dp_shard=1 if replicated else ranks,
        tp=1,
        pp=1,
        micro_batch_size=sample.micro_batch,
        gradient_accumulation_steps=1,
        global_batch_size=sample.micro_batch * ranks,
        sequence_length=sample.length,
        precision="fp32" if cluster.device.is_cpu else "bf16",
        optimizer="adamw",
        activation_checkpointing=variant.checkpointing,
        offload=variant.offload,
    )
    case = TrainingCase(model=sample.name, task="causal-lm", configuration=configuration, config=sample.config)
    return replace(case, task=default_task(case.facts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """A training run, as its ranks get it."""

    model: str
    config: Mapping[str, Any]
    """Empty for a model that is known by name."""
    task: Task
    plan: Mapping[str, Any]
    """The object of the JSON contract."""
    run_directory: str
    """For the metrics."""
    seconds: float
    """How long steps are timed, about."""
    threads: int
    """Per rank."""
