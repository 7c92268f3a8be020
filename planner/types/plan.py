"""Plan: one complete decision, with what it costs and where every figure came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from operator import attrgetter
from typing import Any, TypedDict

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.errors import ContradictoryRequest
from planner.types.shares import Sizes, read_layers, read_sizes

# The degrees of parallelism of a plan, checked when they are made.


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degrees whose product is the world size.

    `dp_replicate` ranks hold copies of the same shard, `dp_shard` ranks share one copy of the states, `tp` ranks split
    every layer, `pp` ranks split the stack of layers, `cp` ranks split every sequence. `ep` is no factor of its
    own: the experts of a mixture are spread over `ep` of the ranks that dp_shard, cp and tp make.

    Raises:
        ContradictoryRequest: a degree is below 1, the product is not `world_size`, or `ep` does not divide its ranks.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    world_size: int

    def __post_init__(self) -> None:
        degrees = (self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp)
        if min(*degrees, self.ep) < 1 or prod(degrees) != self.world_size:
            cp = f" x cp {self.cp}" if self.cp != 1 else ""
            raise ContradictoryRequest(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}{cp} x tp {self.tp} x pp {self.pp}"
                f" = {prod(degrees)} is not the world size {self.world_size}"
            )
        if self.dp_shard * self.cp * self.tp % self.ep:
            raise ContradictoryRequest(
                f"ep {self.ep} does not divide dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} ="
                f" {self.dp_shard * self.cp * self.tp} ranks; use a degree that does"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard


SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Way of running a job: the `plan` object of the JSON contract.

    `sync_each_micro_batch` says that FSDP reduces gradients in every micro-batch, so that none are kept whole;
    False is what `no_sync` (and HF Trainer) does: one reduction per step, at 4 bytes per parameter and rank more.
    `offload_ratio` is the share of what `offload` names that leaves the device. `gradient_compression` is how
    gradients travel between ranks; checkpointing takes one in `checkpoint_every` blocks; `recompute_modules` are
    the parts of a block, with commas between, that selective checkpointing drops where the code base has a list of
    them; `virtual_stages` is how many stages of an interleaved pipeline a rank has; with `sequence_parallel` the tp
    ranks split the sequence between their products. `activations_on_host` keeps in host memory what checkpointing
    starts again from. Of ZeRO++ (arXiv 2306.10209), `hpz_partition_size` ranks share a second copy of the weights,
    which backward all-gathers; `quantized_weights` and `quantized_gradients` travel in 8 and in 4 bits.
    `micro_batches` says how many samples of a micro-batch each data-parallel rank has where they are not alike
    (`3x8,1x4`, see `planner.types.shares`); `micro_batch_size` is then the largest. `layers_per_stage` says how many
    blocks each stage of a pipeline has, in the order of the model, where they are not as even as they go (`3x9,1x5`).

    Raises:
        ContradictoryRequest: a word is unknown, or micro-batch x accumulation x data-parallel ranks is not the global
        batch.
    """

    strategy: words.Strategy
    backend: words.Backend
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    pp_schedule: words.Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    sequence_length: int
    precision: words.Precision
    optimizer: words.Optimizer
    attention: words.Attention = "sdpa"
    activation_checkpointing: words.Checkpointing = "none"
    checkpoint_every: int = 1
    recompute_modules: str = ""
    offload: words.Offload = "none"
    offload_ratio: float = 1.0
    sync_each_micro_batch: bool = True
    gradient_compression: words.Compression = "none"
    activations_on_host: bool = False
    hpz_partition_size: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    micro_batches: str = ""
    layers_per_stage: str = ""

    def __post_init__(self) -> None:
        for name, value in zip(_WORDS, _words_in(self), strict=True):
            if value not in _WORDS[name]:
                raise ContradictoryRequest(f"{name} {value!r} is not one of {', '.join(_WORDS[name])}")
        for name, value in zip(_COUNTS, _counts_in(self), strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContradictoryRequest(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not 0 < self.offload_ratio <= 1:
            raise ContradictoryRequest(f"offload_ratio is {self.offload_ratio!r}; it must be above 0 and at most 1")
        if self.activations_on_host and self.activation_checkpointing == "none":
            raise ContradictoryRequest(
                "activations on the host are those that checkpointing keeps; choose full or selective"
            )
        if self.checkpoint_every > 1 and self.activation_checkpointing != "full":
            raise ContradictoryRequest(
                f"one block in {self.checkpoint_every} is recomputed by full checkpointing; choose full"
            )
        if self.recompute_modules:
            self._check_recomputed()
        if self.micro_batches:
            self._check_shares()
        if self.layers_per_stage:
            self._check_layers()
        if self.ep > 1:
            self.dims  # noqa: B018  # refuses a degree that does not divide its ranks
        if self.samples_together * self.gradient_accumulation_steps != self.global_batch_size:
            ranks = self.dp_replicate * self.dp_shard
            together = self.samples_together * self.gradient_accumulation_steps
            raise ContradictoryRequest(
                f"micro-batch {self.micro_batches or self.micro_batch_size} x accumulation"
                f" {self.gradient_accumulation_steps} x {ranks} data-parallel ranks = {together} is not the global"
                f" batch {self.global_batch_size}"
            )

    def _check_recomputed(self) -> None:
        unknown = [name for name in self.recomputed if name not in words.RECOMPUTED_MODULES]
        if unknown:
            choices = ", ".join(words.RECOMPUTED_MODULES)
            raise ContradictoryRequest(f"recompute modules {', '.join(unknown)!r}: use some of {choices}")
        if self.activation_checkpointing != "selective":
            raise ContradictoryRequest("recompute modules are parts of selective checkpointing; choose selective")

    def _check_shares(self) -> None:
        sizes, ranks = self.shares, self.dp_replicate * self.dp_shard
        named, largest = sum(count for count, _ in sizes), max(size for _, size in sizes)
        if named != ranks:
            raise ContradictoryRequest(
                f"micro_batches {self.micro_batches!r} are of {named} ranks, and {ranks} are data-parallel"
            )
        if largest != self.micro_batch_size:
            raise ContradictoryRequest(
                f"micro_batches {self.micro_batches!r} are of up to {largest} samples, and micro_batch_size, the"
                f" largest, is {self.micro_batch_size}"
            )

    def _check_layers(self) -> None:
        named, stages = len(self.stage_layers), self.pp * self.virtual_stages
        if self.pp == 1 or named != stages:
            raise ContradictoryRequest(
                f"layers_per_stage {self.layers_per_stage!r} are of {named} stage{'s' * (named > 1)}, and pp {self.pp}"
                f"{f' x {self.virtual_stages} virtual stages' if self.virtual_stages > 1 else ''} makes {stages}"
            )

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Blocks of each stage in the order of the model, as the plan names them; none where they go evenly."""
        return read_layers(self.layers_per_stage) if self.layers_per_stage else ()

    @property
    def shares(self) -> Sizes:
        """Data-parallel ranks in order, those that are alike together, with the samples of a micro-batch of each."""
        if not self.micro_batches:
            return ((self.dp_replicate * self.dp_shard, self.micro_batch_size),)
        return read_sizes(self.micro_batches)

    @property
    def micro_batch_text(self) -> str:
        """Samples of a micro-batch, of each rank where they are not alike: `4`, `3x8,1x4`."""
        return self.micro_batches or str(self.micro_batch_size)

    @property
    def is_uneven(self) -> bool:
        """True if data-parallel ranks have micro-batches of different sizes."""
        return bool(self.micro_batches) and len({size for _, size in self.shares}) > 1

    @property
    def has_shares(self) -> bool:
        """True if ranks have shares of their own: micro-batches of different sizes, or stages with named blocks."""
        return self.is_uneven or bool(self.layers_per_stage)

    @property
    def samples_together(self) -> int:
        """Samples of one micro-batch of all ranks."""
        if not self.micro_batches:
            return self.micro_batch_size * self.dp_replicate * self.dp_shard
        return sum(ranks * size for ranks, size in self.shares)

    def samples_before(self, rank: int) -> int:
        """Count the samples of a micro-batch of the data-parallel ranks before one."""
        before = 0
        for ranks, size in self.shares:
            before += min(ranks, rank) * size
            rank -= min(ranks, rank)
        return before

    def micro_batch_of(self, rank: int) -> int:
        """Return the samples of a micro-batch of one data-parallel rank."""
        return self.samples_before(rank + 1) - self.samples_before(rank)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The parts of a block that selective checkpointing drops; none where the code base has a way of its own."""
        return tuple(name.strip() for name in self.recompute_modules.split(",")) if self.recompute_modules else ()

    @property
    def accumulates(self) -> bool:
        """True if a step has more than one micro-batch."""
        return self.gradient_accumulation_steps > 1

    @property
    def fetches_by_module(self) -> bool:
        """True if DeepSpeed's ZeRO-3 fetches and releases the parameters of each module."""
        return self.strategy == "zero3" and self.backend == "deepspeed"

    @property
    def counts_samples(self) -> bool:
        """True if its work is in samples: one of length one has no tokens, and what is called tokens are samples."""
        return self.sequence_length == 1

    @property
    def world_size(self) -> int:
        """Ranks of the run: the product of all degrees but ep."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def dims(self) -> ParallelDims:
        """The degrees, checked against the world size."""
        return ParallelDims(
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            world_size=self.world_size,
        )

    @property
    def state_shards(self) -> int:
        """Ranks over which the states of what every rank computes with are sharded, where the strategy shards any.

        The ranks of one sample hold the same weights, so that they share in it (torchtitan's dp_shard_cp mesh).
        """
        return self.dp_shard if self.strategy in ("single", "ddp") else self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """The same of routed experts, of which each of `ep` ranks has its own."""
        if self.ep == 1 or self.strategy in ("single", "ddp"):
            return self.state_shards
        return max(self.dp_shard * self.cp * self.tp // self.ep, 1)

    @property
    def sharing(self) -> int:
        """Number of ranks that work on one sample together."""
        return self.tp * self.pp * self.cp

    @property
    def splits_model(self) -> bool:
        """True if ranks share the work on one sample, so that data parallelism is not all there is."""
        return self.tp * self.pp * self.cp * self.ep > 1

    @property
    def degrees_text(self) -> str:
        """The degrees over which ranks share a sample, as they follow a strategy's name: `, tp 2, pp 2 (1f1b)`."""
        pieces = f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else ""
        layers = f", layers {self.layers_per_stage}" if self.layers_per_stage else ""
        more = {"pp": f" ({self.pp_schedule}{pieces}{layers})"}
        degrees = {name: getattr(self, name) for name in words.DEGREES}
        return "".join(f", {name} {degree}{more.get(name, '')}" for name, degree in degrees.items() if degree > 1)

    @property
    def zero_plus_text(self) -> str:
        """Traits of ZeRO++, as lists name them: `hpz 8`, `weights in 8 bits`, `gradients in 4 bits`."""
        hpz = (f"hpz {self.hpz_partition_size}",) if self.hpz_partition_size > 1 else ()
        narrow = (("weights in 8 bits", self.quantized_weights), ("gradients in 4 bits", self.quantized_gradients))
        return ", ".join((*hpz, *(text for text, is_on in narrow if is_on)))

    @property
    def uses_host(self) -> bool:
        """True if host memory holds a part of training; where such a run fails, either memory may have been short."""
        return self.offload != "none" or self.activations_on_host

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 for strategies that are not ZeRO."""
        return words.ZERO_STAGES.get(self.strategy, 0)


_WORDS: dict[str, tuple[str, ...]] = {
    "strategy": words.STRATEGIES,
    "backend": words.BACKENDS,
    "precision": words.PRECISIONS,
    "optimizer": words.OPTIMIZERS,
    "attention": words.ATTENTIONS,
    "pp_schedule": words.SCHEDULES,
    "activation_checkpointing": words.CHECKPOINTINGS,
    "offload": words.OFFLOADS,
    "gradient_compression": words.COMPRESSIONS,
}
_COUNTS = (
    *("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "virtual_stages", "checkpoint_every"),
    *("hpz_partition_size",),
    *("micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "sequence_length"),
)
_words_in, _counts_in = attrgetter(*_WORDS), attrgetter(*_COUNTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on the busiest rank. The first six figures are those alive at the peak and add up to it.

    `phases` maps load, forward, loss, backward and step, and eval and save where they were asked for, to their
    allocated peaks, and where completions are generated generate, reward, reference, logprob, update and sync too;
    `states` holds the resident parameters_bytes, gradients_bytes and optimizer_bytes of the ZeRO arithmetic, whatever
    the peak's phase; those of the busiest rank where FSDP2 cannot spread them evenly.
    `host_bytes_per_node` is what training takes, `host_load_bytes_per_node` what loading the model takes.
    `device_used_bytes` is what NVML shows for the process where there is room, `device_used_upper_bytes` what nineteen
    of twenty real runs stay below: a plan has room where that fits. `device_needed_bytes` is what it needs with every
    margin, and decides whether it is proposed; `device_least_bytes` what no run could do without, and decides whether
    it fits at all. Both are 0 in plans of earlier releases.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    temporaries_bytes: int
    peak_allocated_bytes: int
    peak_phase: str
    peak_reserved_bytes: int
    device_overhead_bytes: int
    device_used_bytes: int
    device_used_upper_bytes: int
    host_bytes_per_node: int
    host_load_bytes_per_node: int = 0
    device_needed_bytes: int = 0
    device_least_bytes: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step. `exposed_communication_seconds` is the part of communication that nothing hides.

    Nine runs of ten should take between `step_seconds_low` and `step_seconds_high`; None until a plan is made of it.
    `predicted_step_seconds` is what the model alone says where `step_seconds` is a measurement, None elsewhere; the
    parts of a measured step are then in the proportions that the model predicts.

    Where completions are generated, `phases` has the seconds of generate, reward, reference, logprob, update and sync
    of one round, which `round_seconds` takes as a whole, and a step its share of them.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    offload_seconds: float
    optimizer_seconds: float
    bubble_seconds: float
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    predicted_step_seconds: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    round_seconds: float | None = None

    def scaled(self, ratio: float) -> StepTime:
        """Every part so many times as long, without an interval."""
        return StepTime(
            step_seconds=self.step_seconds * ratio,
            compute_seconds=self.compute_seconds * ratio,
            communication_seconds=self.communication_seconds * ratio,
            exposed_communication_seconds=self.exposed_communication_seconds * ratio,
            offload_seconds=self.offload_seconds * ratio,
            optimizer_seconds=self.optimizer_seconds * ratio,
            bubble_seconds=self.bubble_seconds * ratio,
            phases={name: seconds * ratio for name, seconds in self.phases.items()},
            round_seconds=None if self.round_seconds is None else self.round_seconds * ratio,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Rates that follow from a step time; `mfu` is a fraction of the dense peak, or None if no peak is known."""

    tokens_per_second_per_gpu: float
    samples_per_second: float
    tflops_per_gpu: float
    mfu: float | None


# What a plan says of its job: sections of the JSON contract. `plan_io` checks values against these annotations; keys
# that other releases wrote are left as they are.

Count = int
"""A number of devices or nodes, at least 1."""


class ModelSection(TypedDict, total=False):
    """The model of a plan; the sizes of its architecture are in `facts`."""

    name: str
    family: str
    model_type: str
    kind: str
    parameters: int
    trainable_parameters: int
    active_parameters: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    block_class: str
    facts: dict[str, Any] | None


class ClusterNeeds(TypedDict):
    """Keys that every plan's cluster has."""

    device: str
    capacity_bytes: int


class ClusterSection(ClusterNeeds, total=False):
    """The cluster of a plan."""

    vendor: str
    gpus: Count
    nodes: Count
    gpus_per_node: Count
    intra_link: str | None
    inter_link: str | None
    nics_per_node: Count
    host_memory_bytes_per_node: int
    nvme_bytes_per_node: int
    node_type: str
    assumed: str
    probed: bool
    groups: list[dict[str, Any]]


class WorkloadSection(TypedDict, total=False):
    """The part of a plan's `Workload` that its configuration does not hold."""

    task: words.Task
    source_length: int
    max_memory_bytes: int | None
    host_memory_bytes: int | None
    evaluation_batch_size: int
    evaluation_steps_kept: int
    save: words.Save
    code: str
    compile: bool
    loss: words.Loss
    method: words.Method
    lora_rank: int | None
    lora_targets: str | None
    train_only: str
    load_dtype: words.LoadDtype | None
    fp8_recipe: words.Fp8Recipe | None
    ema: bool
    expert_imbalance: float | None
    prompt_length: int
    completion_length: int
    completion_max: int
    generations: int
    prompts_per_step: int
    num_iterations: int
    beta: float
    rollout: words.Rollout
    rollout_gpus: int
    rollout_tp: int
    rollout_memory: float
    rollout_sleep: bool
    steps_off: int
    precompute_reference: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A configuration with its price. `plan_io.plan_to_dict` gives what `estimate --json` prints and plan files hold.

    `workload` holds what the configuration does not (task, limits), `alternatives` the plans it was chosen over with
    the reason. `limited_by` says what keeps the plan from being faster; `runnable` whether `dsplan run` can run it
    today, with `notes` holding the reason where it cannot.
    """

    model: ModelSection
    cluster: ClusterSection
    configuration: Configuration
    memory: MemoryEstimate
    time: StepTime
    throughput: Throughput
    verdict: words.Verdict
    limited_by: str
    runnable: bool
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, words.Provenance] = field(default_factory=dict)
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    alternatives: tuple[Mapping[str, object], ...] = ()
    schema_version: int = SCHEMA_VERSION
