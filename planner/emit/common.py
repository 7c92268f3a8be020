"""Needs of a config beyond the plan, and what every format asks of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.cost.memory.host import NO_ROOM_TO_LOAD
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts
from planner.models.facts_document import facts_of_plan
from planner.types.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitOptions:
    """Settings of the run that do not change the plan; the defaults are those of HF Trainer.

    `cpu` makes configs for a machine without GPUs; None takes it from the plan's cluster. `nvme_path` is where a plan
    with offload `nvme` swaps to.
    """

    cpu: bool | None = None
    nvme_path: str = "/local_nvme"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    gradient_clipping: float = 1.0
    remarks: tuple[str, ...] = ()
    """Sentences to put beside the duties of a trainer's config."""


DEFAULTS = EmitOptions()
TRAINERS = ("torchtitan", "megatron", "megatron-bridge", "nemo", "nanotron")
"""The formats of trainers that split layers, stacks of layers, sequences or experts."""
FINETUNERS = ("axolotl", "llama-factory", "ms-swift", "trl", "torchtune", "verl", "openrlhf", "nemo-rl")
"""The formats of trainers of fine-tuning and post-training."""
EMIT_ELSEWHERE = f"emit it as {', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}"
# As the vendors' device plugins for Kubernetes call them.
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}


def on_cpu(plan: Plan, options: EmitOptions) -> bool:
    """Return whether the config is for CPU ranks."""
    return plan.cluster.get("vendor") == "cpu" if options.cpu is None else options.cpu


def device_resource(plan: Plan, options: EmitOptions) -> str:
    """Return Kubernetes' name for the plan's GPUs; empty for CPU ranks and for what no cluster schedules."""
    return "" if on_cpu(plan, options) else _RESOURCES.get(str(plan.cluster.get("vendor", "nvidia")), "")


def model_number(plan: Plan, key: str) -> int:
    """Return a whole number of the plan's model object.

    Raises:
        ContradictoryRequest: the plan does not hold it.
    """
    value = plan.model.get(key)
    if not isinstance(value, int):
        raise ContradictoryRequest(f"the plan's model has no {key}; make the plan again with `dsplan recommend`")
    return value


def node_layout(plan: Plan) -> tuple[int, int]:
    """Nodes used and ranks on each; a plan smaller than a node takes part of one.

    Raises:
        ContradictoryRequest: the ranks do not fill whole nodes.
    """
    world = plan.configuration.world_size
    nodes, gpus = plan.cluster.get("nodes", 1), plan.cluster.get("gpus", world)
    if world <= gpus // nodes:
        return 1, world
    per_node = gpus // nodes
    if world % per_node:
        raise ContradictoryRequest(f"{world} ranks do not fill whole nodes of {per_node} GPUs; plan for {gpus} GPUs")
    return world // per_node, per_node


def facts_of(plan: Plan, form: str) -> ModelFacts:
    """Return the sizes of the plan's model, a decoder.

    Raises:
        ContradictoryRequest: neither the plan nor the catalogue holds them, they are counts without an architecture, or
            the model is no decoder.
    """
    task = plan.workload.get("task") or "causal-lm"
    facts = facts_of_plan(plan.model, task) if task in words.TASKS else None
    name = plan.model.get("name") or "its model"
    if facts is None or facts.measured_counts is not None or facts.recorded_as:
        raise refuse(plan, form, f"of {name}", "name a model of the catalogue or a config.json and plan again")
    if facts.kind != "decoder":
        raise refuse(plan, form, f"of {name}, no decoder,", "emit it as accelerate or torchrun")
    return facts


def refuse(plan: Plan, form: str, reason: str, remedy: str) -> ContradictoryRequest:
    """Return the error for a plan that `form` cannot carry."""
    strategy = plan.configuration.strategy
    article = "an" if strategy.startswith(("fsdp", "hsdp")) else "a"  # letter by letter
    plan_words = " ".join((article, strategy, "plan", *reason.split()))
    if _OF_ESTIMATE.search(remedy):
        remedy = remedy.replace("plan with", "plan by `dsplan estimate --out FILE` with", 1)
    return ContradictoryRequest(f"{plan_words} cannot be written as {form}; {remedy}")


_OF_ESTIMATE = re.compile(
    r"plan with .*--(strategy|tp|pp|cp|ep|pp-schedule|no-sequence-parallel|checkpointing|checkpoint-every|offload-ratio"
    r"|gradient-compression|virtual-stages)\b"
)
"""Remedies whose flags `dsplan estimate` takes and `dsplan recommend` does not."""


def every_block(plan: Plan) -> str:
    """Return which blocks a plan recomputes, `every 2nd block recomputed`."""
    every = plan.configuration.checkpoint_every
    ending = "th" if every % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(every % 10, "th")
    return f"every {every}{ending} block recomputed"


def require_data_parallel_only(plan: Plan, form: str) -> None:
    """Refuse plans that split layers or the stack of layers.

    Raises:
        ContradictoryRequest: tp or pp is above 1.
    """
    degrees = plan.configuration
    if degrees.splits_model:
        further = "".join(f" and {name} {size}" for name, size in (("cp", degrees.cp), ("ep", degrees.ep)) if size > 1)
        raise refuse(plan, form, f"with tp {degrees.tp} and pp {degrees.pp}{further}", EMIT_ELSEWHERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """Abilities of a trainer that splits layers, by the plan's words; what it lacks is refused by `require`."""

    strategies: frozenset[str]
    instead: str
    """What to plan in place of a strategy that it lacks."""
    precisions: frozenset[str]
    optimizers: frozenset[str]
    schedules: frozenset[str]
    checkpointings: frozenset[str]
    offloads: frozenset[str]
    compressions: frozenset[str] = frozenset({"none"})
    attentions: frozenset[str] = frozenset(words.ATTENTIONS)


def require(plan: Plan, form: str, can: Abilities) -> None:
    """Refuse in one line what a trainer lacks.

    Raises:
        ContradictoryRequest: a word of the plan is none of the trainer's.
    """
    configuration, workload = plan.configuration, plan.workload
    if plan.cluster.get("vendor") == "cpu":
        raise refuse(plan, form, "for CPU ranks", "it trains on GPUs; use `dsplan run`")
    if configuration.strategy not in can.strategies:
        raise refuse(plan, form, "", can.instead)
    for reason, word, allowed, flag in (
        ("in", configuration.precision, can.precisions, "precision"),
        ("with optimizer", configuration.optimizer, can.optimizers, "optimizer"),
        ("with checkpointing", configuration.activation_checkpointing, can.checkpointings, "checkpointing"),
        ("with gradient compression", configuration.gradient_compression, can.compressions, "gradient-compression"),
        ("with offload", configuration.offload, can.offloads, "offload"),
        ("with attention", configuration.attention, can.attentions, "attention"),
    ):
        if word not in allowed:
            raise refuse(plan, form, f"{reason} {word}", f"plan with --{flag} {' or '.join(sorted(allowed))}")
    if configuration.pp > 1 and configuration.pp_schedule not in can.schedules:
        choices = " or ".join(sorted(can.schedules))
        raise refuse(plan, form, f"with schedule {configuration.pp_schedule}", f"plan with --pp-schedule {choices}")
    if configuration.activations_on_host:
        raise refuse(plan, form, "with activations on the host", "plan without --activations-on-host")
    method = plan.workload.get("method") or "full"
    if method != "full":
        raise refuse(plan, form, f"with method {method}", "emit it as accelerate, whose script adds PEFT")
    for name in ("train_only", "ema"):
        if workload.get(name):
            flag = name.replace("_", "-")
            raise refuse(plan, form, f"with --{flag}", f"plan without --{flag}, which dsplan's own scripts can do")


def is_zero(plan: Plan) -> bool:
    """Return whether the plan is one of the ZeRO stages."""
    return plan.configuration.strategy in words.ZERO_STAGES


# Requirements of a plan that the format has no field for, left to the training script.


_ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
_LAUNCH_SCRIPTS = ("torchrun", "slurm", "mpi", "kubernetes", "skypilot", "dstack")
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adamw-fused": "torch.optim.AdamW(fused=True)",
    "adamw-forloop": "torch.optim.AdamW(foreach=False)",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw-8bit-paged": "bitsandbytes.optim.PagedAdamW8bit",
    "adamw-4bit": "torchao.optim.AdamW4bit",
    "adamw-fp8": "torchao.optim.AdamWFp8",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "lion": "a Lion optimizer",
    "muon": "torch.optim.Muon for matrices and AdamW for the rest",
}
_IN_JSON = ("adamw", "adamw-fused", "adamw-forloop", "sgd", "adafactor", "lion")
"""What DeepSpeed makes of its JSON."""


def script_duties(plan: Plan, format: str, options: EmitOptions) -> tuple[str, ...]:
    """One sentence per duty, for the head of a file and for standard error; none where `dsplan run` does it all."""
    if format in TRAINERS:
        return (*_trainer_duties(plan, format), *options.remarks)
    if format in FINETUNERS:
        return (*_finetuner_duties(plan, format), *options.remarks)
    if format == "slurm" and not plan.configuration.splits_model:
        return ()
    return (
        *_degrees(plan, format),
        *_batch(plan, format),
        *_loading(plan),
        *_products(plan, format),
        *_what_runs(plan),
        *_checkpointing(plan, format),
        *_parking(plan),
        *_travel(plan, format),
        *_optimizer(plan, format, options),
        *_reduction(plan, format),
        *_synchronisation(plan, format),
        *_ranks(format),
    )


def as_comment(duties: tuple[str, ...]) -> str:
    """Return the duties as comment lines of YAML and shell."""
    return "".join(("# The plan holds for a script that\n", *(f"#  - {duty}\n" for duty in duties)))


def _degrees(plan: Plan, format: str) -> tuple[str, ...]:
    configuration = plan.configuration
    if not configuration.splits_model:
        return ()
    if format == "accelerate":
        return _accelerate_degrees(plan)
    degrees = {"tensor": configuration.tp, "pipeline": configuration.pp}
    degrees |= {name: size for name, size in (("context", configuration.cp), ("expert", configuration.ep)) if size > 1}
    wanted = ", ".join(f"{name} parallel {size}" for name, size in degrees.items())
    return (f"sets up {wanted}, because `dsplan run` cannot run such a plan yet; or {EMIT_ELSEWHERE}",)


def _accelerate_degrees(plan: Plan) -> tuple[str, ...]:
    configuration = plan.configuration
    duties = []
    if configuration.tp > 1:
        duties.append(f"loads the model with tp_plan='auto' (tensor parallel {configuration.tp})")
    if configuration.cp > 1:
        duties.append("enters accelerator.maybe_context_parallel in every step, inputs as its buffers; HF Trainer does")
    return tuple(duties)


_CODES: Mapping[str, tuple[str, ...]] = {
    "torchtitan": ("torchtitan",),
    "nanotron": ("nanotron",),
    "nemo": ("nemo", "megatron"),
    **dict.fromkeys(("megatron", "megatron-bridge"), ("megatron", "nemo")),
    **dict.fromkeys(FINETUNERS, ("transformers",)),
    "torchtune": ("torch",),
}
"""Whose modules a trainer runs, its own first; those of Megatron's formats are one."""


def code_of_trainer(plan: Plan, format: str) -> str | None:
    """Return whose modules a format's trainer runs where the plan counts others; None where they are the plan's."""
    codes, code = _CODES.get(format), plan.workload.get("code") or "transformers"
    return None if codes is None or code in codes else codes[0]


def _trainer_duties(plan: Plan, format: str) -> tuple[str, ...]:
    """Return what a trainer's own config leaves open, and where the trainer does otherwise than the plan counts."""
    configuration, workload = plan.configuration, plan.workload
    own = code_of_trainer(plan, format)
    code = plan.workload.get("code") or "transformers"
    duties = ["has its number of steps, data and tokenizer from you"]
    if own is not None:
        duties.append(f"runs the modules of {code}; plan again with --code {own} for this trainer's own")
    if format != "torchtitan" and (rotation := _rotation_left(plan, format)):
        duties.append(f"is given the model's rope {rotation}, which a plan does not hold")
    if configuration.activation_checkpointing == "selective" and own is not None:
        duties.append("recomputes all but matrix products and attention; the trainer's own choice is another")
    if format == "torchtitan" and configuration.tp > 1 and not configuration.sequence_parallel:
        duties.append("keeps whole sequences between its products; torchtitan 0.2.2 splits them, which takes less")
    loss = plan.workload.get("loss") or "plain"
    if loss not in _LOSSES.get(format, ("plain",)):
        duties.append(f"has a {loss} loss ({_LOSS_WAYS[loss]}), for which the trainer has no setting")
    if workload.get("compile") and format != "torchtitan":
        duties.append("compiles its blocks, for which the trainer has no setting")
    return tuple(duties)


def _rotation_left(plan: Plan, format: str) -> str:
    """Return what of rotary positions a trainer's config has not got; empty where the model has no more of it."""
    facts = facts_of_plan(plan.model, plan.workload.get("task", "causal-lm"))
    if facts is None:
        return "" if plan.model.get("family") in ("gpt2",) else "base and scaling"
    if facts.position_type != "rope":
        return ""
    if facts.rotary_base and format != "nanotron":
        return "scaling" if facts.rotary_scaling else ""
    return "base and scaling" if facts.rotary_scaling or not facts.rotary_base else "base"


def _finetuner_duties(plan: Plan, format: str) -> tuple[str, ...]:
    """Return what is left to name in such a trainer's config, and where it does otherwise than the plan counts."""
    duties = ["has its data, and whatever else stands here in capitals, from you"]
    own = code_of_trainer(plan, format)
    code = plan.workload.get("code") or "transformers"
    if own is not None:
        duties.append(f"runs the modules of {code}; plan again with --code {own} for this trainer's own")
    if plan.workload.get("rollout") == "server" and format == "trl":
        duties.append("finds a server of `trl vllm-serve` on the GPUs that generate")
    duties.extend(_room_to_load(plan))
    reduces = format in ("axolotl", "llama-factory", "ms-swift", "trl")
    if reduces and _is_fsdp(plan) and plan.configuration.precision in words.MIXED_PRECISIONS:
        duties.append("gets gradients reduced in the compute dtype, which is accelerate's policy; the plan counts fp32")
    return tuple(duties)


_LOSSES = {"torchtitan": ("plain", "chunked")}
"""How a format's trainer can compute the loss; Megatron's fusion still makes logits."""


def _batch(plan: Plan, format: str) -> tuple[str, ...]:
    if format not in ("accelerate", *_LAUNCH_SCRIPTS):
        return ()
    configuration = plan.configuration
    shares = f"{configuration.micro_batches} (engine.micro_batch_size)" if configuration.is_uneven else ""
    return (
        f"takes {shares or configuration.micro_batch_size} samples per rank and step, accumulated"
        f" {configuration.gradient_accumulation_steps} times (global batch {configuration.global_batch_size})",
    )


def _loading(plan: Plan) -> tuple[str, ...]:
    """Return the duty to name a dtype: transformers 5 loads a checkpoint in the one it was saved in unless told."""
    configuration = plan.configuration
    dtype = "bfloat16" if configuration.precision == "bf16-pure" else "float32"
    if is_zero(plan) and configuration.precision in words.MIXED_PRECISIONS:
        dtype = "float16" if configuration.precision == "fp16" else "bfloat16"
    loaded = loaded_as(plan)
    dtype = dtype if loaded is None else _TORCH_NAMES.get(loaded) or compute_dtype(plan)
    attention = _ATTENTION[configuration.attention]
    duty = f"loads the model with dtype=torch.{dtype}, attn_implementation={attention!r}"
    return duty, *_quantisation(loaded, dtype), *_room_to_load(plan)


_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def compute_dtype(plan: Plan) -> str:
    """Return torch's name of the dtype that a plan computes in."""
    return {"fp32": "float32", "fp16": "float16"}.get(plan.configuration.precision, "bfloat16")


def loaded_by_default(plan: Plan) -> words.LoadDtype | None:
    """Return what frozen weights are loaded as where the plan says nothing of it; None where all are trained."""
    method = plan.workload.get("method") or "full"
    if method == "full":
        return None
    if method == "qlora":
        return "nf4"
    precision = plan.configuration.precision
    return "fp32" if precision == "fp32" else "fp16" if precision == "fp16" else "bf16"


def loaded_as(plan: Plan) -> words.LoadDtype | None:
    """Return what frozen weights are loaded as; None where all are trained."""
    usual = loaded_by_default(plan)
    return usual if usual is None else plan.workload.get("load_dtype") or usual


def _quantisation(loaded: words.LoadDtype | None, dtype: str) -> tuple[str, ...]:
    """Return the duty to quantise.

    Codes are stored in the dtype that is computed in: accelerate 1.15 shards none of whole numbers, and FSDP2 casts
    those of another (PEFT's guide to FSDP and QLoRA, `docs/source/accelerate/fsdp.md`, "the same as" the model's).
    """
    if loaded == "int8":
        return ("stores linear layers in 8 bits: quantization_config=BitsAndBytesConfig(load_in_8bit=True)",)
    if loaded != "nf4":
        return ()
    settings = ", ".join(
        (
            "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True",
            f"bnb_4bit_compute_dtype=torch.{dtype}, bnb_4bit_quant_storage=torch.{dtype}",
        )
    )
    return (f"stores linear layers in 4 bits: quantization_config=BitsAndBytesConfig({settings})",)


def _room_to_load(plan: Plan) -> tuple[str, ...]:
    """Return the plan's note that a node has no room for a whole model in every process, and how it is loaded then."""
    return tuple(f"loads as counted: {note}" for note in plan.notes if note.startswith(NO_ROOM_TO_LOAD))


def _products(plan: Plan, format: str) -> tuple[str, ...]:
    """Return the duty to add torchao's converters, where the format itself does not ask accelerate for them."""
    if plan.configuration.precision not in words.SCALED_PRECISIONS or converts_products(plan, format):
        return ()
    recipe = plan.workload.get("fp8_recipe") or "tensorwise"
    what = f"converts the linear layers of its blocks to {plan.configuration.precision} with the {recipe} recipe"
    return (f"{what} (torchao, or Transformer Engine) and computes in bf16 besides",)


def converts_products(plan: Plan, format: str) -> bool:
    """Return whether a format has accelerate put torchao's layers in, whose only recipe there is by whole tensors."""
    return format == "accelerate" and not is_zero(plan) and plan.workload.get("fp8_recipe") == "tensorwise"


def _what_runs(plan: Plan) -> tuple[str, ...]:
    """Return what the workload asks for that is a matter of the script alone."""
    workload, duties = plan.workload, []
    method = plan.workload.get("method") or "full"
    if method != "full":
        targets = f"rank {workload.get('lora_rank')}, on {workload.get('lora_targets')}"
        duties.append(f"trains {method} adapters ({targets}) beside frozen weights, with PEFT")
    if only := plan.workload.get("train_only"):
        duties.append(f"trains only weights whose names match {only!r}")
    if (dtype := plan.workload.get("load_dtype")) and method == "full":
        duties.append(f"loads frozen weights in {dtype}")
    if workload.get("ema"):
        duties.append("keeps a moving average of the weights")
    if workload.get("compile"):
        duties.append("puts blocks under torch.compile")
    loss = plan.workload.get("loss") or "plain"
    if loss != "plain":
        duties.append(f"has a {loss} loss: {_LOSS_WAYS[loss]}")
    code = plan.workload.get("code") or "transformers"
    if code != "transformers":
        duties.append(f"runs the modules of {code}")
    return tuple(duties)


_LOSS_WAYS = {
    "chunked": "logits of a part of the tokens at a time",
    "fused": "Liger's, without logits",
    "tiled": "TRL's log-probabilities, in tiles of tokens and words",
}


def recomputing_whole_blocks(plan: Plan) -> Plan:
    """Return a plan with full recomputation where it has selective: settings of libraries know no other.

    A run then takes less memory than the plan and more time, and never more memory.
    """
    if plan.configuration.activation_checkpointing != "selective":
        return plan
    whole = replace(plan.configuration, activation_checkpointing="full", recompute_modules="")
    return replace(plan, configuration=whole)


def _checkpointing(plan: Plan, format: str) -> tuple[str, ...]:
    level = plan.configuration.activation_checkpointing
    in_file = format == "huggingface" or (format == "accelerate" and _is_fsdp(plan))
    if level == "none" or (in_file and level == "full"):
        return ()
    if level == "selective":
        return ("recomputes all but matrix products and attention; whole blocks would take less memory and more time",)
    return ("calls model.gradient_checkpointing_enable()",)


def _parking(plan: Plan) -> tuple[str, ...]:
    """`gradient_checkpointing_enable` has no such option."""
    if not plan.configuration.activations_on_host:
        return ()
    return ("keeps the inputs of checkpointed blocks in host memory, as dsplan.initialize does",)


def _travel(plan: Plan, format: str) -> tuple[str, ...]:
    compression = plan.configuration.gradient_compression
    if compression == "none" or (format == "deepspeed" and compression != "int8"):
        return ()
    if compression == "int8":
        return ("sends gradients in 8 bits, as dsplan.initialize does and no other engine",)
    return (f"reduces gradients in {compression}",)


def _optimizer(plan: Plan, format: str, options: EmitOptions) -> tuple[str, ...]:
    name = plan.configuration.optimizer
    in_json = name in _IN_JSON and not (name == "lion" and on_cpu(plan, options))
    if (format == "deepspeed" and in_json) or (format == "huggingface" and name != "adamw-forloop"):
        return ()
    return (f"uses {_OPTIMIZERS[name]}",)


def _reduction(plan: Plan, format: str) -> tuple[str, ...]:
    """Return the remark that accelerate's FSDP2 policy reduces in the compute dtype; the plan counts fp32."""
    mixed = plan.configuration.precision in words.MIXED_PRECISIONS
    if format not in ("accelerate", "huggingface") or not _is_fsdp(plan) or not mixed:
        return ()
    return ("gets gradients reduced in the compute dtype, which is accelerate's policy; the plan counts fp32",)


def _synchronisation(plan: Plan, format: str) -> tuple[str, ...]:
    """Return the remark that accelerate keeps whole gradients while it accumulates unless told to reduce each time."""
    configuration = plan.configuration
    accumulates = _is_fsdp(plan) and configuration.gradient_accumulation_steps > 1
    if format != "accelerate" or not accumulates or not configuration.sync_each_micro_batch:
        return ()
    steps = configuration.gradient_accumulation_steps
    return (f"gives Accelerator a GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)",)


def _ranks(format: str) -> tuple[str, ...]:
    if format != "mpi":
        return ()
    return ("calls dsplan.initialize, or reads its rank from Open MPI's variables itself",)


def _is_fsdp(plan: Plan) -> bool:
    return plan.configuration.strategy in words.FSDP_STRATEGIES
