"""Job: everything the cost model looks at when it prices one configuration, its workload first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol, TypedDict, cast

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.errors import ContradictoryRequest
from planner.models.counting.adapters import freeze_but, with_adapters
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts, ParameterCounts
from planner.models.facts_document import facts_document
from planner.question_defaults import EXPERT_IMBALANCE, LORA_RANK, LORA_TARGETS
from planner.types.cluster import SHIPPED, Cluster, Rates
from planner.types.plan import ClusterSection, Configuration, ModelSection, WorkloadSection
from planner.types.post_training import PostTraining, post_training_of_section, post_training_section


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training job, independent of how it is spread over devices.

    `sequence_length` is tokens per sample (patches for images, decoder tokens for speech), `source_length` the
    encoder's length in encoder-decoders. `max_memory_bytes` caps every device, `host_memory_bytes` every node.

    Evaluation and saving count for the peak where they are asked for. `evaluation_batch_size` is samples per device and
    evaluation step, 0 where none is asked for; the logits of `evaluation_steps_kept` steps stay on the device at once
    (HF Trainer's `eval_accumulation_steps`; without it, every step of the evaluation), 0 where only the loss is kept.
    `save` says whether a checkpoint is assembled on rank 0 (`full`) or every rank writes its own part (`sharded`).

    What runs: `code` names whose modules (see `planner.cost.code_bases`), `compile` says that blocks are under
    torch.compile, `loss` how logits become a loss. `method` is how weights are trained, with the rank of the adapters
    and what they are put on; `train_only` is a pattern of the names of what is trained, empty for all. `load_dtype` is
    what weights are loaded as, None for what the precision says; `fp8_recipe` how 8-bit and 4-bit products are scaled,
    None for others; with `ema` an average of the weights is kept. `expert_imbalance` are the tokens that come to the
    busiest rank's experts over the mean, where experts are spread over ranks. `post` is what post-training adds.

    Raises:
        ContradictoryRequest: a number is not positive or a word is not in the vocabulary.
    """

    task: words.Task
    sequence_length: int
    global_batch_size: int
    precision: words.Precision = "bf16"
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    source_length: int = 0
    max_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    evaluation_batch_size: int = 0
    evaluation_steps_kept: int = 0
    save: words.Save = "none"
    code: str = "transformers"
    compile: bool = False
    loss: words.Loss = "plain"
    method: words.Method = "full"
    lora_rank: int = LORA_RANK
    lora_targets: str = LORA_TARGETS
    train_only: str = ""
    load_dtype: words.LoadDtype | None = None
    fp8_recipe: words.Fp8Recipe | None = None
    ema: bool = False
    expert_imbalance: float = EXPERT_IMBALANCE
    post: PostTraining | None = None

    @property
    def generates(self) -> bool:
        """True if a round of training begins with completions that the model generates."""
        return self.task in words.GENERATING and self.post is not None

    @property
    def freezes(self) -> bool:
        """True if only a part of the weights, or adapters beside them, are trained."""
        return self.method != "full" or bool(self.train_only)

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one sample holds: two for pairs."""
        return 2 if self.task in words.PAIRED else 1

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch_size", "lora_rank"):
            if getattr(self, name) < 1:
                raise ContradictoryRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("evaluation_batch_size", "evaluation_steps_kept"):
            if getattr(self, name) < 0:
                raise ContradictoryRequest(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.evaluation_steps_kept and not self.evaluation_batch_size:
            raise ContradictoryRequest(
                f"evaluation_steps_kept is {self.evaluation_steps_kept} without evaluation_batch_size; give both"
            )
        for name, allowed in (
            ("task", words.TASKS),
            ("precision", words.PRECISIONS),
            ("optimizer", words.OPTIMIZERS),
            ("attention", words.ATTENTIONS),
            ("save", words.SAVES),
            ("loss", words.LOSSES),
            ("method", words.METHODS),
            ("load_dtype", (None, *words.LOAD_DTYPES)),
            ("fp8_recipe", (None, *words.FP8_RECIPES)),
        ):
            if getattr(self, name) not in allowed:
                raise ContradictoryRequest(
                    f"{name} {getattr(self, name)!r} is not one of {', '.join(filter(None, allowed))}"
                )


def counts_of(facts: ModelFacts, workload: Workload) -> ParameterCounts:
    """Return the model's counts with what the workload trains of it.

    Raises:
        ContradictoryRequest: the targets of adapters, or the names of what is trained, fit nothing.
    """
    counts = count_parameters(facts)
    if workload.method != "full":
        if facts.measured_counts is not None and any(block.frozen for block in counts.blocks):
            return counts  # of a module that was prepared already: its adapters are among its weights
        dora = workload.method == "dora"
        rank, targets = workload.lora_rank, workload.lora_targets
        return with_adapters(facts, counts, rank=rank, targets=targets, magnitude=dora)
    return freeze_but(facts, counts, workload.train_only) if workload.train_only else counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One configuration of one model, workload and cluster.

    `counts` are the model's parameters by component, `stage` the pipeline stage whose rank is looked at.
    """

    facts: ModelFacts
    counts: ParameterCounts
    workload: Workload
    cluster: Cluster
    configuration: Configuration
    stage: int = 0

    @property
    def is_first_stage(self) -> bool:
        """True on the pipeline stage that embeds the tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the pipeline stage that computes the loss."""
        return self.stage == self.configuration.pp - 1

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens one rank sees in one forward pass (decoder side of encoder-decoders)."""
        configuration = self.configuration
        return self.sequences * configuration.sequence_length // configuration.cp

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: its samples, or two for each where they are pairs."""
        return self.configuration.micro_batch_size * self.workload.sequences_per_sample

    @property
    def has_reference(self) -> bool:
        """True if a frozen model is run beside the one that is trained; adapters are switched off for it."""
        task, post = self.workload.task, self.workload.post
        if task in words.GENERATING:
            return post is not None and post.beta > 0
        return task in words.REFERRING and not (post is not None and post.precompute_reference)

    @property
    def extra_forwards(self) -> int:
        """Forward passes without gradients beside each of training.

        The reference model's is one. KTO runs both models on mismatched completions too, and where the reference is
        precomputed it still runs the trained one (TRL 1.16 `kto_trainer.py`).
        """
        if self.workload.task not in words.REFERRING:
            return 0
        is_kto = self.workload.task == "kto"
        return (2 if is_kto else 1) * self.has_reference + is_kto

    @property
    def eager_attention(self) -> bool:
        """True if attention runs unfused: asked for, or all that the model has."""
        return self.facts.runs_eager(self.configuration.attention)

    @property
    def source_length(self) -> int:
        """Encoder positions per sample: a speech model's fixed window, the workload's, or the decoder's length."""
        return self.facts.max_source_positions or self.workload.source_length or self.configuration.sequence_length


# The sections of a job in the JSON contract: model, cluster, workload and provenance.


class Described(Protocol):
    """A job or a request, as far as it is what every configuration of it shares."""

    @property
    def facts(self) -> ModelFacts:
        """The model."""

    @property
    def counts(self) -> ParameterCounts:
        """Its parameters by component."""

    @property
    def workload(self) -> Workload:
        """The work to be done."""

    @property
    def cluster(self) -> Cluster:
        """The devices it runs on."""


class Sections(TypedDict):
    """Sections that all plans of a job share."""

    model: ModelSection
    cluster: ClusterSection
    workload: WorkloadSection


def sections_of(job: Described) -> Sections:
    """Return the sections `model`, `cluster` and `workload` of a plan."""
    return {"model": _model(job), "cluster": cluster_section(job.cluster), "workload": _workload(job)}


def workload_of(section: Mapping[str, Any] | WorkloadSection, configuration: Configuration) -> Workload:
    """Return the workload of a plan's `workload` section and its configuration.

    What a release did not write is as by default.

    Raises:
        ContradictoryRequest: a word or a number is none that a workload has.
    """
    values: dict[str, Any] = {"post": post_training_of_section(section)}
    for item in fields(Workload):
        if item.name == "post":
            continue
        value = getattr(configuration, item.name, None)
        values[item.name] = section.get(item.name) if value is None else value
    return Workload(**{"task": "", **{name: value for name, value in values.items() if value is not None}})


def provenance(
    job: Job, memory: words.Provenance, *, measured: bool, like_it: bool = False
) -> dict[str, words.Provenance]:
    """Return where each group of figures comes from.

    `measured` says that the step itself was, `like_it` that runs like it were.
    """
    rates = job.cluster.rates
    groups = {
        "compute": rates.matmul,
        "communication": rates.collectives or None,
        "offload": rates.host_to_device,
        "optimizer": rates.cpu_optimizer,
    }
    learned = job.cluster.factors != SHIPPED
    groups_from: dict[str, words.Provenance] = {"memory": memory}
    for group, rate in groups.items():
        groups_from[group] = "datasheet" if rate is None and not learned else "calibrated"
    groups_from["step"] = (
        "measured" if measured else "calibrated" if learned or like_it or rates != Rates() else "datasheet"
    )
    return groups_from


def _model(job: Described) -> ModelSection:
    facts = job.facts
    return {
        "name": facts.name,
        "family": facts.family,
        "model_type": facts.model_type,
        "kind": facts.kind,
        "parameters": job.counts.total,
        "trainable_parameters": job.counts.trained.total,
        "active_parameters": facts.active_parameters,
        "hidden_size": facts.hidden_size,
        "num_layers": facts.num_layers,
        "vocab_size": facts.vocab_size,
        "block_class": facts.block_class,
        "facts": facts_document(facts, job.workload.task),
    }


def cluster_section(cluster: Cluster) -> ClusterSection:
    """Return a cluster as the JSON contract has it; `groups` are there where nodes differ."""
    section: ClusterSection = {
        "device": cluster.device.name,
        "vendor": cluster.device.vendor,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "capacity_bytes": cluster.capacity_bytes,
        "intra_link": cluster.intra_link.name if cluster.intra_link else None,
        "inter_link": cluster.inter_link.name if cluster.inter_link else None,
        "nics_per_node": cluster.nics_per_node,
        "host_memory_bytes_per_node": cluster.host_memory_bytes_per_node,
        "nvme_bytes_per_node": cluster.nvme_bytes_per_node,
        "node_type": cluster.node_type,
        "assumed": cluster.assumed,
        "probed": cluster.probed,
    }
    if cluster.groups:
        section["groups"] = [
            {
                "device": group.device.name,
                "nodes": group.nodes,
                "gpus_per_node": group.gpus_per_node,
                "capacity_bytes": group.capacity_bytes,
                "inter_link": group.inter_link.name if group.inter_link else None,
                "speed": group.speed,
            }
            for group in cluster.groups
        ]
    return section


def _workload(job: Described) -> WorkloadSection:
    workload = job.workload
    section: WorkloadSection = {
        "task": workload.task,
        "source_length": workload.source_length,
        "max_memory_bytes": workload.max_memory_bytes,
        "host_memory_bytes": workload.host_memory_bytes,
        "evaluation_batch_size": workload.evaluation_batch_size,
        "evaluation_steps_kept": workload.evaluation_steps_kept,
        "save": workload.save,
        "code": workload.code,
        "compile": workload.compile,
        "loss": workload.loss,
        "method": workload.method,
        "lora_rank": workload.lora_rank if workload.method != "full" else None,
        "lora_targets": workload.lora_targets if workload.method != "full" else None,
        "train_only": workload.train_only,
        "load_dtype": workload.load_dtype,
        "fp8_recipe": workload.fp8_recipe,
        "ema": workload.ema,
        "expert_imbalance": workload.expert_imbalance if job.facts.is_moe else None,
    }
    return cast("WorkloadSection", section | post_training_section(workload.post))
