"""Request: a question with every default filled in and said aloud."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hardware_db.device import Device
from hardware_db.probe import Machine
from hardware_db.records import dataclass
from hardware_db.units import GB
from planner import limits
from planner import vocabulary as words
from planner.calibration.experience import NO_EXPERIENCE, Experience
from planner.cluster.budget import NO_BUDGET, Budget
from planner.cluster.resolve import cluster_of_plan
from planner.cost.code_bases import code_base, facts_for_code
from planner.cost.precision import usual_recipe, why_not_scaled
from planner.errors import ContradictoryRequest, DsplanError
from planner.models.facts import ModelFacts, ParameterCounts
from planner.models.facts_document import facts_of_plan
from planner.models.tasks import default_sequence_length, default_task, facts_for_task, possible_tasks
from planner.question_defaults import EXPERT_IMBALANCE, LORA_RANK, LORA_TARGETS, PLANS_SHOWN
from planner.search.post_training import (
    PostTrainingOptions,
    lengths_of,
    post_training,
    usual_batch,
    usual_loss,
)
from planner.types.cluster import Cluster
from planner.types.job import Workload, counts_of, workload_of
from planner.types.plan import Plan

SAMPLES_PER_GPU = 8
"""Global batch per GPU that is planned for when none is asked."""
WITHOUT_DEEPSPEED = "use backend native, whose ZeRO shards the same, or precision fp32 or bf16"
"""What to do where DeepSpeed has not got a precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOptions(PostTrainingOptions):
    """The user's description of the work; a field is None if the user did not say. GB are 1e9 bytes."""

    task: words.Task | None = None
    seq_len: int | None = None
    image_size: int | None = None
    source_len: int | None = None
    global_batch: int | None = None
    precision: words.Precision | None = None
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    max_memory_gb: float | None = None
    host_memory_gb: float | None = None
    eval_batch: int | None = None
    eval_keep: int | None = None
    save: words.Save = "none"
    code: str = "transformers"
    compile: bool = False
    loss: words.Loss | None = None
    method: words.Method = "full"
    lora_rank: int | None = None
    lora_targets: str | None = None
    train_only: str | None = None
    load_dtype: words.LoadDtype | None = None
    fp8_recipe: words.Fp8Recipe | None = None
    ema: bool = False
    expert_imbalance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Degrees that ranks share the work on one sample by, as a script or a person decided them.

    Data parallelism takes the ranks that are left, of which `shard` share one set of states. The search chooses those
    that are None.
    """

    shard: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    pp_schedule: words.Schedule | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None

    @property
    def sharing(self) -> int:
        """Ranks that work on the same sample."""
        return self.tp * self.pp * self.cp

    def divide(self, ranks: int) -> bool:
        """Return whether so many ranks can have these degrees."""
        if ranks % self.sharing:
            return False
        return self.shard is None or (self.shard % self.cp == 0 and ranks // self.sharing * self.cp % self.shard == 0)

    def __str__(self) -> str:
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return ", ".join(f"{name} {value}" for name, value in values if value not in (1, None)) or "tp 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlus:
    """Settings of ZeRO++, by the fields of a configuration."""

    hpz_partition_size: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A question: model, work, devices, and how plans are to be ranked.

    `defaults` are the sentences that say what was taken for granted. `strategies` limits the search where not None;
    so does `micro_batch`, for scripts that cut their batches themselves. `simplest_first` lets a simpler plan go
    before one that cannot be told to be faster. `experience` is what was measured before. `zero_backend` runs ZeRO
    stages. `offload` and `offload_ratio` are what a script or a person decided, and `checkpointings` what they left
    to choose from; None leaves them to the search. `gradient_compression` and `activations_on_host` hold for every
    plan, the latter where it checkpoints; `zero_plus` for those of DeepSpeed's stage 3. `degrees` are those that
    every plan must have; None leaves them to the search; with `shard` alone so many ranks share one set of states.
    `splits` are then the degrees that a live script can be run with, on CPUs too; None: all, on GPUs.
    `to_the_limit` lets plans in that fit without every margin, where none fits with them.
    """

    facts: ModelFacts
    counts: ParameterCounts
    workload: Workload
    cluster: Cluster
    defaults: tuple[str, ...] = ()
    objective: words.Objective = "throughput"
    top: int = PLANS_SHOWN
    allow_unrunnable: bool = False
    simplest_first: bool = True
    budget: Budget = NO_BUDGET
    strategies: tuple[words.Strategy, ...] | None = None
    micro_batch: int | None = None
    experience: Experience = NO_EXPERIENCE
    zero_backend: words.Backend = "deepspeed"
    offload: words.Offload | None = None
    offload_ratio: float | None = None
    checkpointings: tuple[words.Checkpointing, ...] | None = None
    gradient_compression: words.Compression = "none"
    activations_on_host: bool = False
    zero_plus: ZeroPlus | None = None
    degrees: Degrees | None = None
    shard: int | None = None
    splits: tuple[words.Degree, ...] | None = None
    to_the_limit: bool = False

    @property
    def usd_per_gpu_hour(self) -> float | None:
        """The given price, else that of the cluster's node type, or None if neither is known."""
        return self.cluster.usd_per_gpu_hour if self.budget.usd_per_gpu_hour is None else self.budget.usd_per_gpu_hour

    def backend_of(self, strategy: words.Strategy, *, needs_native: bool) -> words.Backend:
        """Return what runs a strategy.

        DeepSpeed is handed whole models here and shards states over all ranks; our own ZeRO runs where ranks share the
        work on one sample or where replicas of the shards are wanted (`needs_native`).
        """
        zero = "native" if needs_native and code_base(self.workload.code).runs_here else self.zero_backend
        return words.default_backend(strategy, zero=zero)


_LIMITS = {
    "seq_len": limits.TOKENS,
    "source_len": limits.TOKENS,
    "image_size": limits.PIXELS,
    "global_batch": limits.SAMPLES,
    "eval_batch": limits.SAMPLES,
    "eval_keep": limits.SAMPLES,
    "lora_rank": limits.SAMPLES,
}


def make_request(facts: ModelFacts, cluster: Cluster, options: WorkOptions, **ranking: Any) -> Request:
    """Return a request from what the user said; `ranking` are the fields of Request that say how to rank.

    Without a `zero_backend` DeepSpeed runs ZeRO where it has the precision, and our own elsewhere.

    Raises:
        ContradictoryRequest: a number is out of range, the sequence is longer than the model has positions for, the
            task is not one of such a model's, or the device, the code or `zero_backend` has not got the precision.
    """
    for name, limit in _LIMITS.items():
        limit.check(f"--{name.replace('_', '-')}", getattr(options, name))
    task = _task(facts, options)
    if facts.kind == "diffusion" and (options.method != "full" or options.train_only):
        raise ContradictoryRequest(
            f"what adapters of {facts.name} keep was never traced; use --method full without --train-only"
        )
    facts = facts_for_code(facts_for_task(facts, task), options.code)
    defaults: list[str] = [cluster.assumed] if cluster.assumed else []
    precision = options.precision or _precision(cluster, defaults)
    recipe = _scaled_recipe(cluster.device, precision, options, defaults)
    if precision in words.SCALED_PRECISIONS or not code_base(options.code).runs_here:
        # Nothing here runs such products or such code, so that every plan is for another tool.
        ranking["allow_unrunnable"] = True
    lengths = lengths_of(options, task, options.seq_len, default_sequence_length(facts), defaults)
    length = _sequence_length(facts, options, defaults, None if lengths is None else lengths[0] + lengths[2])
    batch = _global_batch(cluster, options, task, defaults)
    workload = Workload(
        task=task,
        sequence_length=length,
        global_batch_size=batch,
        precision=precision,
        optimizer=options.optimizer,
        attention=options.attention,
        source_length=_source_length(facts, options),
        max_memory_bytes=_bytes("--max-memory-gb", options.max_memory_gb),
        host_memory_bytes=_bytes("--host-memory-gb", options.host_memory_gb),
        evaluation_batch_size=options.eval_batch or 0,
        evaluation_steps_kept=_steps_kept(options),
        save=options.save,
        code=options.code,
        compile=options.compile,
        loss=options.loss or usual_loss(task, options.code),
        post=post_training(options, task, lengths, total=length, batch=batch, heads=facts.num_heads, gpus=cluster.gpus),
        method=options.method,
        **_adapters(options, defaults),
        train_only=options.train_only or "",
        load_dtype=_load_dtype(options, precision, defaults),
        fp8_recipe=recipe,
        ema=options.ema,
        expert_imbalance=_imbalance(facts, options),
    )
    ranking["zero_backend"] = _zero_backend(ranking.get("zero_backend"), cluster.device, workload.precision, defaults)
    counts = counts_of(facts, workload)
    request = Request(facts=facts, counts=counts, workload=workload, cluster=cluster, defaults=tuple(defaults))
    return replace(request, **ranking)


def request_of_plan(plan: Plan, machine: Machine | None = None) -> Request | None:
    """Return the request that a plan answers, as far as its file says; `machine` is this one, for a plan of processors.

    Return None if the model is not known any more, or the hardware is none of the catalogue's.
    """
    chosen = plan.configuration
    try:
        workload = workload_of(plan.workload, chosen)
        facts = facts_of_plan(plan.model, workload.task)
        cluster = cluster_of_plan(plan.cluster, machine)
        counts = None if facts is None else counts_of(facts, workload)
    except DsplanError:
        return None
    if facts is None or counts is None or cluster is None:
        return None
    return Request(
        facts=facts,
        counts=counts,
        workload=workload,
        cluster=cluster,
        allow_unrunnable=not plan.runnable,
        zero_backend=chosen.backend if chosen.zero_stage else "deepspeed",
        gradient_compression=chosen.gradient_compression,
        activations_on_host=chosen.activations_on_host,
    )


_QUANTISED = ("int8", "nf4")


def _load_dtype(options: WorkOptions, precision: words.Precision, defaults: list[str]) -> words.LoadDtype | None:
    """Return what was asked for, as far as weights loaded so can be trained."""
    loaded, method = options.load_dtype, options.method
    if method == "qlora" and loaded not in (None, *_QUANTISED):
        raise ContradictoryRequest(
            f"--method qlora quantises what it freezes, and --load-dtype {loaded} does not; use --method lora"
        )
    if loaded in _QUANTISED and method == "full":
        raise ContradictoryRequest(
            f"weights of --load-dtype {loaded} cannot be trained; use --method qlora, with adapters beside them"
        )
    if loaded == "fp32" and precision == "bf16-pure":
        raise ContradictoryRequest(
            "--precision bf16-pure keeps weights in bf16, and --load-dtype is fp32; use --precision bf16"
        )
    if loaded in ("bf16", "fp16") and precision == "fp32":
        raise ContradictoryRequest(
            f"--precision fp32 keeps weights in fp32, and --load-dtype is {loaded}; use --precision {loaded}"
        )
    if loaded is None and method != "full":
        taken = "nf4" if method == "qlora" else {"fp32": "fp32", "fp16": "fp16"}.get(precision, "bf16")
        defaults.append(f"frozen weights loaded as {taken} (--load-dtype)")
    return loaded


def _adapters(options: WorkOptions, defaults: list[str]) -> dict[str, Any]:
    """Rank and targets of adapters."""
    given = {"lora_rank": options.lora_rank, "lora_targets": options.lora_targets}
    decided = {name: value for name, value in given.items() if value is not None}
    if options.method == "full":
        for name in decided:
            raise ContradictoryRequest(f"--{name.replace('_', '-')} is for --method lora, qlora or dora; name one")
        return {}
    if options.lora_rank is None:
        defaults.append(f"adapters of rank {LORA_RANK} (--lora-rank)")
    if options.lora_targets is None:
        defaults.append(f"adapters beside {LORA_TARGETS} layers (--lora-targets)")
    if options.train_only:
        raise ContradictoryRequest(f"--train-only says what --method {options.method} says too; leave one out")
    return {"lora_rank": LORA_RANK, **decided}


def _imbalance(facts: ModelFacts, options: WorkOptions) -> float:
    """Return how uneven the experts' tokens are: as asked, else what is taken for usual."""
    if options.expert_imbalance is None:
        return EXPERT_IMBALANCE
    limits.IMBALANCE.check("--expert-imbalance", options.expert_imbalance)
    if not facts.is_moe:
        raise ContradictoryRequest(f"--expert-imbalance is for models with experts, which {facts.name} has not")
    return options.expert_imbalance


def _scaled_recipe(
    device: Device, precision: words.Precision, options: WorkOptions, defaults: list[str]
) -> words.Fp8Recipe | None:
    """Return how products in 8 or 4 bits are scaled: as asked, else as the device's own units do it."""
    if problem := why_not_scaled(device, precision, options.fp8_recipe, options.code):
        raise ContradictoryRequest(problem)
    if precision not in words.SCALED_PRECISIONS or options.fp8_recipe is not None:
        return options.fp8_recipe
    recipe = usual_recipe(device, precision)
    defaults.append(f"recipe {recipe} (--fp8-recipe)")
    return recipe


def _task(facts: ModelFacts, options: WorkOptions) -> words.Task:
    possible = possible_tasks(facts)
    if options.task is not None and options.task not in possible:
        raise ContradictoryRequest(
            f"--task {options.task} is not for {facts.name}, a model of kind {facts.kind}; use {' or '.join(possible)}"
        )
    return options.task or default_task(facts)


def _source_length(facts: ModelFacts, options: WorkOptions) -> int:
    if options.source_len is not None and facts.kind != "encoder-decoder":
        raise ContradictoryRequest(
            f"--source-len {options.source_len} is for encoder-decoders that read text, and {facts.name} is of kind"
            f" {facts.kind}; use --seq-len"
        )
    return options.source_len or 0


def _steps_kept(options: WorkOptions) -> int:
    if options.eval_keep is not None and options.eval_batch is None:
        raise ContradictoryRequest(
            f"--eval-keep {options.eval_keep} keeps the logits of evaluation steps; give their samples per GPU with"
            " --eval-batch"
        )
    return options.eval_keep or 0


def _sequence_length(facts: ModelFacts, options: WorkOptions, defaults: list[str], parts: int | None) -> int:
    """Return the tokens of a sample: those of its `parts`, prompt and completion, where they are given."""
    if facts.kind == "diffusion":
        return _patches(facts, options, defaults)
    if options.image_size is not None:
        raise ContradictoryRequest(
            f"--image-size {options.image_size} is for models that make images, and {facts.name} is of kind"
            f" {facts.kind}; leave it out"
        )
    given = options.seq_len if parts is None else parts
    if given is None:
        length = default_sequence_length(facts)
        defaults.append(f"sequence length {length} (--seq-len)")
        return length
    longest = facts.max_position_embeddings
    if facts.learned_positions and longest and given > longest:
        flag = "--seq-len" if parts is None else "--prompt-len and --completion-len make"
        raise ContradictoryRequest(
            f"{flag} {given} is more than the {longest} learned positions of {facts.name}; use at most {longest}"
        )
    return given


def _patches(facts: ModelFacts, options: WorkOptions, defaults: list[str]) -> int:
    """Return the patches of a square image, which are a denoiser's tokens."""
    if options.seq_len is not None:
        raise ContradictoryRequest(
            f"--seq-len {options.seq_len} is for tokens, and {facts.name} makes images; use --image-size"
        )
    if options.image_size is None:
        defaults.append(f"images of {facts.image_size} x {facts.image_size} pixels (--image-size)")
    side, rest = divmod(options.image_size or facts.image_size, facts.patch_size)
    if rest or not side:
        near = max(side, 1) * facts.patch_size
        raise ContradictoryRequest(
            f"--image-size {options.image_size} is no multiple of the {facts.patch_size} pixels of a patch of"
            f" {facts.name}; use {near} or {near + facts.patch_size}"
        )
    return side * side


def _global_batch(cluster: Cluster, options: WorkOptions, task: words.Task, defaults: list[str]) -> int:
    if options.global_batch is not None:
        return options.global_batch
    batch, sentence = usual_global_batch(cluster, options, task)
    defaults.append(sentence)
    return batch


def usual_global_batch(cluster: Cluster, options: WorkOptions, task: words.Task) -> tuple[int, str]:
    """Return the global batch where none is stated, and the sentence that says so."""
    batch = usual_batch(options, task, SAMPLES_PER_GPU * cluster.gpus)
    return batch, f"global batch {batch} (--global-batch)"


def _precision(cluster: Cluster, defaults: list[str]) -> words.Precision:
    precision = usual_precision(cluster.device)
    defaults.append(f"precision {precision} (--precision)")
    return precision


def usual_precision(device: Device) -> words.Precision:
    """Return what a device computes in where nothing else is asked for."""
    if device.is_cpu:
        return "fp32"
    if device.supports_bf16:
        return "bf16"
    return "fp16" if (device.peak_flops("fp16") or 0) > (device.peak_flops("fp32") or 0) else "fp32"


def why_not_deepspeed(device: Device, precision: words.Precision) -> str | None:
    """Return why DeepSpeed cannot train in a precision on a device, in one sentence; None where it can.

    Its accelerators are asked before it trains (DeepSpeed 0.19, accelerator/cpu_accelerator.py and
    cuda_accelerator.py): fp16 takes oneDNN's fp16 or compute capability 7.0, bf16 is everywhere.
    """
    if precision != "fp16":
        return None
    capability = tuple(int(part) for part in (device.compute_capability or "7.0").split("."))
    if device.is_cpu and not device.supports_fp16:
        return f"DeepSpeed has no fp16 on this processor ({device.architecture}), which lacks AVX512-FP16"
    if capability < (7, 0):
        return f"DeepSpeed has no fp16 on {device.name}, of compute capability {device.compute_capability}, below 7.0"
    return None


def _zero_backend(
    requested: words.Backend | None, device: Device, precision: words.Precision, defaults: list[str]
) -> words.Backend:
    lacks = why_not_deepspeed(device, precision)
    if lacks and requested == "deepspeed":
        raise ContradictoryRequest(f"{lacks}; {WITHOUT_DEEPSPEED}")
    if lacks and requested is None:
        defaults.append(f"ZeRO by backend native, since {lacks} (--backend)")
    return requested or ("native" if lacks else "deepspeed")


def _bytes(flag: str, gigabytes: float | None) -> int | None:
    limits.GIGABYTES.check(flag, gigabytes)
    return None if gigabytes is None else round(gigabytes * GB)
