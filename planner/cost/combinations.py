"""The one table of what does not go together in a plan, from which search, estimate and engine take their sentences.

It has strategies, backends, degrees, offload, compression, checkpointing, schedules, optimizers, precisions, and
adapters beside frozen weights. What depends on a model (heads that a degree does not divide) is in
`planner.search.estimate`, and for a live module where it is split.
"""

from __future__ import annotations

from collections.abc import Callable

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.types.plan import Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One line of the table."""

    breaks: Callable[[Configuration], bool]
    """Whether a configuration asks for what does not go together."""
    sentence: str
    """Why, and what to do: a template over `plan`, the configuration, and what `_derived_words` adds."""

    def why(self, plan: Configuration) -> str:
        """Return the sentence for a configuration that breaks the rule."""
        return self.sentence.format(plan=plan, **_derived_words(plan))


def why_contradictory(plan: Configuration) -> str | None:
    """Return why nothing, here or elsewhere, runs a configuration; None where something may."""
    return next((rule.why(plan) for rule in _CONTRADICTIONS if rule.breaks(plan)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """Frozen weights: the method that trains beside them, and what they are kept in."""

    method: words.Method = "full"
    """How a model is trained."""
    load_dtype: words.LoadDtype | None = None
    """What frozen weights are kept in; None: as a script has them, or what the method says."""

    @property
    def in_4_bits(self) -> bool:
        """True if matrices are bitsandbytes' 4-bit ones."""
        return self.load_dtype == "nf4" or (self.method == "qlora" and self.load_dtype is None)


def why_refused(plan: Configuration, adapted: Adapted | None = None) -> str | None:
    """Return why `dsplan run` and `dsplan.initialize` cannot run a configuration; None where they can."""
    reason = why_contradictory(plan)
    reason = reason or next((rule.why(plan) for rule in _NOT_HERE if rule.breaks(plan)), None)
    if reason or adapted is None:
        return reason
    return next((rule.why(plan) for breaks, rule in _BESIDE_FROZEN if breaks(adapted) and rule.breaks(plan)), None)


def compresses(strategy: str, backend: str, compression: words.Compression) -> bool:
    """Return whether a strategy can send its gradients so: all can in 16 bits, our own exchange alone in 8."""
    return compression != "int8" or strategy in ("single", "ddp") or backend == "native"


def offloads_of(strategy: str, backend: str) -> tuple[words.Offload, ...]:
    """Return what a strategy can offload, `none` left out. DeepSpeed swaps to NVMe in stage 3 alone."""
    if strategy == "zero3":
        return ("optimizer", "all", "nvme")
    if strategy in ("zero1", "zero2"):
        return ("optimizer", "nvme") if backend == "native" else ("optimizer",)
    return ("all",) if strategy in words.FSDP_STRATEGIES else ()


def other_trainer(plan: Configuration) -> str:
    """Return the trainer that people run such splits of layers with.

    torchtitan shards by FSDP2, Megatron-LM keeps replicas and shards their optimizer, Megatron-DeepSpeed shards further
    by ZeRO.
    """
    if plan.strategy in words.FSDP_STRATEGIES:
        return "torchtitan"
    return "Megatron-DeepSpeed" if plan.strategy in ("zero2", "zero3") else "Megatron-LM"


def _cannot_offload(plan: Configuration) -> bool:
    return plan.offload not in ("none", *offloads_of(plan.strategy, plan.backend))


def _anything(plan: Configuration) -> bool:
    return True


def _splits_matrices(plan: Configuration) -> bool:
    return plan.tp * plan.ep > 1


_CONTRADICTIONS = (
    Rule(
        breaks=lambda plan: plan.strategy == "single" and plan.world_size > 1,
        sentence="strategy single uses one GPU, not {plan.world_size}; use ddp, fsdp or zero1-3",
    ),
    Rule(
        breaks=lambda plan: plan.backend not in words.backends_of(plan.strategy),
        sentence="backend {plan.backend} does not run {plan.strategy}; use {backends}",
    ),
    Rule(
        breaks=_cannot_offload,
        sentence="offload {plan.offload} is not possible with {plan.strategy} of backend {plan.backend}; possible:"
        " {offloads}",
    ),
    Rule(
        breaks=lambda plan: plan.offload_ratio < 1 and (plan.offload == "none" or plan.backend != "native"),
        sentence="an offload ratio ({plan.offload_ratio:g}) is for backend native with an offload; leave it out",
    ),
    Rule(
        breaks=lambda plan: not compresses(plan.strategy, plan.backend, plan.gradient_compression),
        sentence="gradient compression int8 is for ddp, and zero1-3 with backend native; use bf16, which all can",
    ),
    Rule(
        breaks=lambda plan: plan.zero_plus_text != "" and (plan.strategy != "zero3" or plan.backend != "deepspeed"),
        sentence="ZeRO++ ({plan.zero_plus_text}) is DeepSpeed's, of stage 3; use zero3 with backend deepspeed",
    ),
    Rule(
        # DeepSpeed 0.19, runtime/config.py: train_batch_size is micro_batch_per_gpu * gradient_acc_step * world size.
        breaks=lambda plan: plan.is_uneven and plan.backend == "deepspeed",
        sentence="DeepSpeed gives every rank as many samples, and micro_batches are {plan.micro_batches}; use backend"
        " native, fsdp or ddp",
    ),
    Rule(
        # DeepSpeed 0.19, utils/groups.py, _create_zero_param_parallel_group.
        breaks=lambda plan: plan.state_shards % plan.hpz_partition_size > 0,
        sentence="hpz {plan.hpz_partition_size} does not divide the {plan.state_shards} ranks that share the weights;"
        " use the ranks of a node",
    ),
    Rule(
        breaks=lambda plan: plan.backend == "native" and plan.precision in words.SCALED_PRECISIONS,
        sentence="backend native has no {plan.precision} products; use backend deepspeed, or precision bf16",
    ),
    Rule(
        breaks=lambda plan: plan.optimizer == "adafactor" and plan.strategy in words.FSDP_STRATEGIES,
        sentence="torch's Adafactor needs whole matrices, which {plan.strategy} shards; use zero1-3, ddp, or another"
        " optimizer",
    ),
    Rule(
        breaks=lambda plan: plan.optimizer == "muon" and plan.backend == "deepspeed",
        sentence="Muon steps whole matrices, which DeepSpeed's {plan.strategy} cuts; use backend native, fsdp or ddp",
    ),
    Rule(
        breaks=lambda plan: plan.optimizer == "muon" and plan.offload != "none",
        sentence="Muon has no form that steps in host memory; leave offload {plan.offload} out",
    ),
    Rule(
        # DeepSpeed 0.19, runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism".
        breaks=lambda plan: plan.pp > 1 and plan.zero_stage > 1 and plan.backend == "deepspeed",
        sentence="DeepSpeed has no {plan.strategy} in a pipeline (pp {plan.pp}); use zero1, fsdp or ddp, or pp 1",
    ),
    Rule(
        breaks=lambda plan: plan.pp == 1 and plan.pp_schedule != "1f1b",
        sentence="schedule {plan.pp_schedule} is for a pipeline; give pp of at least 2",
    ),
    Rule(
        breaks=lambda plan: plan.pp == 1 and plan.virtual_stages > 1,
        sentence="virtual stages ({plan.virtual_stages}) are for a pipeline; give pp of at least 2",
    ),
    Rule(
        breaks=lambda plan: plan.virtual_stages > 1 and plan.pp_schedule != "interleaved",
        sentence="virtual stages ({plan.virtual_stages}) are for schedule interleaved, not {plan.pp_schedule}",
    ),
    Rule(
        breaks=lambda plan: plan.pp_schedule == "interleaved" and plan.virtual_stages == 1,
        sentence="schedule interleaved needs virtual stages of at least 2; with one it is 1f1b",
    ),
    Rule(
        # Megatron-LM's rounds, and torch's ScheduleInterleaved1F1B.
        breaks=lambda plan: plan.pp_schedule == "interleaved" and plan.gradient_accumulation_steps % plan.pp > 0,
        sentence="schedule interleaved runs rounds of pp {plan.pp} micro-batches, and"
        " {plan.gradient_accumulation_steps} are no whole rounds; use gradient accumulation {rounds}",
    ),
    Rule(
        breaks=lambda plan: plan.cp > 1 and plan.attention == "eager",
        sentence="cp {plan.cp} needs fused attention; use attention sdpa, or cp 1",
    ),
    Rule(
        breaks=lambda plan: plan.cp > 1 and plan.sequence_length % (2 * plan.cp) > 0,
        sentence="cp {plan.cp} cuts samples into {halves} parts, two for each rank so that causal attention is"
        " balanced, and sequence length {plan.sequence_length} is no multiple of that",
    ),
    Rule(
        breaks=lambda plan: plan.sequence_parallel and plan.tp == 1,
        sentence="sequence parallelism splits the sequence over tensor-parallel ranks; give tp of at least 2",
    ),
    Rule(
        breaks=lambda plan: plan.sequence_parallel and plan.sequence_length // plan.cp % plan.tp > 0,
        sentence="sequence parallelism cuts {tokens} tokens over tp {plan.tp}, which does not divide them",
    ),
    Rule(
        breaks=lambda plan: plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel,
        sentence="ep {plan.ep} with tp {plan.tp} needs sequence parallelism, so that each rank sends its own tokens",
    ),
)
"""What is in no code base."""

_NOT_HERE = (
    Rule(
        breaks=lambda plan: plan.precision in words.SCALED_PRECISIONS,
        sentence="dsplan run has no {plan.precision} products; accelerate with torchao, torchtitan and Megatron-LM run"
        " them",
    ),
    Rule(
        breaks=lambda plan: plan.splits_model and plan.backend == "deepspeed",
        sentence="dsplan run hands whole models to DeepSpeed, and {split} splits them; use backend native, fsdp or ddp",
    ),
    Rule(
        # MiCS is gone (DeepSpeed 0.19, runtime/config.py: "MiCS ZeRO-3 sharding has been removed").
        breaks=lambda plan: plan.backend == "deepspeed" and plan.dp_replicate > 1 and plan.zero_stage > 0,
        sentence="DeepSpeed 0.19 shards {plan.strategy} over all ranks, and shard {plan.state_shards} is for"
        " {plan.dp_replicate} copies; use backend native, or strategy hsdp",
    ),
    Rule(
        # Its units all-gather what one rank's whole layers are made of; FSDP2 shards the same states per parameter.
        breaks=lambda plan: plan.strategy == "zero3" and plan.pp * plan.ep > 1,
        sentence="zero3 of backend native cuts whole layers, and {split} splits them; use fsdp, which shards the same"
        " states",
    ),
    Rule(
        # Experts' gradients are means over other ranks than those that the samples came from.
        breaks=lambda plan: plan.is_uneven and plan.ep * plan.pp > 1,
        sentence="{split} mixes or lines up the samples of ranks, and micro_batches are {plan.micro_batches}; use pp 1"
        " and ep 1, or as many samples on every rank",
    ),
    Rule(
        # Row and column means, the update's clipping and its relative step are of the whole matrix.
        breaks=lambda plan: plan.optimizer == "adafactor" and _splits_matrices(plan),
        sentence="torch's Adafactor needs whole matrices, which {split} splits; use pp, cp, or another optimizer",
    ),
    Rule(
        breaks=lambda plan: plan.optimizer == "muon" and _splits_matrices(plan),
        sentence="Muon makes whole matrices orthogonal, which {split} splits; use pp, cp, or another optimizer",
    ),
    Rule(
        # Its backward passes of weights alone are torch's own walk of the graph, which calls no hook that sharded
        # weights and recomputation live on.
        breaks=lambda plan: (
            plan.pp_schedule == "zero-bubble"
            and (plan.strategy in words.FSDP_STRATEGIES or plan.activation_checkpointing != "none")
        ),
        sentence="dsplan run splits backward passes, as zero-bubble does, under ddp, zero1 and zero2 without activation"
        " checkpointing; use schedule 1f1b or interleaved",
    ),
    Rule(
        # torch's ScheduleInterleavedZeroBubble: rounds of at least pp micro-batches, all of one size.
        breaks=lambda plan: (
            plan.pp_schedule == "zero-bubble"
            and plan.gradient_accumulation_steps % max(1, plan.gradient_accumulation_steps // plan.pp) > 0
        ),
        sentence="torch's zero-bubble schedule runs equal rounds of at least pp {plan.pp} micro-batches, and"
        " {plan.gradient_accumulation_steps} are none; use gradient accumulation {rounds}",
    ),
)
"""What `dsplan run` does not do, and others may."""


_BESIDE_FROZEN: tuple[tuple[Callable[[Adapted], bool], Rule], ...] = (
    (
        lambda adapted: adapted.load_dtype == "int8",
        Rule(
            breaks=_anything,
            sentence="dsplan run loads no frozen weights in int8; use bf16, or nf4 with method qlora",
        ),
    ),
    (
        lambda adapted: adapted.in_4_bits,
        Rule(
            breaks=lambda plan: plan.tp > 1,
            sentence="tensor parallelism (tp {plan.tp}) splits no weights in 4 bits; use method lora, or tp 1",
        ),
    ),
    (
        lambda adapted: adapted.in_4_bits,
        Rule(
            breaks=lambda plan: plan.backend == "deepspeed",
            sentence="DeepSpeed's {plan.strategy} casts weights, which 4-bit ones do not survive; use backend native,"
            " fsdp or ddp",
        ),
    ),
    (
        # A magnitude is of a row of W + BA, whose norm a rank with a part of A or B does not know.
        lambda adapted: adapted.method == "dora",
        Rule(
            breaks=lambda plan: plan.tp > 1,
            sentence="tensor parallelism (tp {plan.tp}) splits LoRA's adapters and no other kind; use method lora, or"
            " tp 1",
        ),
    ),
)
"""What `dsplan run` does not do where adapters are trained, with the adapters that a line is about."""


def _derived_words(plan: Configuration) -> dict[str, object]:
    """Return what sentences name beside the configuration's own fields."""
    degrees = {name: getattr(plan, name) for name in words.DEGREES}
    return {
        "backends": " or ".join(words.backends_of(plan.strategy)),
        "offloads": ", ".join(offloads_of(plan.strategy, plan.backend)) or "none",
        "rounds": plan.gradient_accumulation_steps + -plan.gradient_accumulation_steps % plan.pp,
        "halves": 2 * plan.cp,
        "tokens": plan.sequence_length // plan.cp,
        "split": " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1),
    }
