"""What a config needs beyond the plan, and what every format asks of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from planner import vocabulary as words
from planner.errors import ContradictoryRequest
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


DEFAULTS = EmitOptions()
# As the vendors' device plugins for Kubernetes call them.
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}


def on_cpu(plan: Plan, options: EmitOptions) -> bool:
    """Whether the config is for CPU ranks."""
    return plan.cluster.get("vendor") == "cpu" if options.cpu is None else options.cpu


def device_resource(plan: Plan, options: EmitOptions) -> str:
    """The name that Kubernetes has for the plan's GPUs; empty for CPU ranks and for what no cluster schedules."""
    return "" if on_cpu(plan, options) else _RESOURCES.get(str(plan.cluster.get("vendor", "nvidia")), "")


def model_number(plan: Plan, key: str) -> int:
    """A whole number of the plan's model object.

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
    nodes, gpus = plan.cluster.get("nodes", 1), plan.cluster.get("gpus")
    world = plan.configuration.world_size
    if not isinstance(nodes, int) or not isinstance(gpus, int) or world <= gpus // nodes:
        return 1, world
    per_node = gpus // nodes
    if world % per_node:
        raise ContradictoryRequest(f"{world} ranks do not fill whole nodes of {per_node} GPUs; plan for {gpus} GPUs")
    return world // per_node, per_node


def model_word(plan: Plan, key: str) -> str:
    """A word of the plan's model object, empty where the plan does not hold it."""
    value = plan.model.get(key)
    return value if isinstance(value, str) else ""


def refuse(plan: Plan, form: str, reason: str, remedy: str) -> ContradictoryRequest:
    """The error for a plan that `form` cannot carry."""
    plan_words = " ".join(("a", plan.configuration.strategy, "plan", *reason.split()))
    return ContradictoryRequest(f"{plan_words} cannot be written as {form}; {remedy}")


def require_data_parallel_only(plan: Plan, form: str) -> None:
    """Refuse plans that split layers or the stack of layers.

    Raises:
        ContradictoryRequest: tp or pp is above 1.
    """
    degrees = plan.configuration
    if degrees.tp > 1 or degrees.pp > 1:
        raise refuse(plan, form, f"with tp {degrees.tp} and pp {degrees.pp}", "emit it as torchrun")


def is_zero(plan: Plan) -> bool:
    """Whether the plan is one of the ZeRO stages."""
    return plan.configuration.strategy in words.ZERO_STAGES


# Requirements of a plan that the format has no field for, left to the training script.


_ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
_LAUNCH_SCRIPTS = ("torchrun", "slurm", "mpi", "kubernetes")
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adamw-fused": "torch.optim.AdamW(fused=True)",
    "adamw-forloop": "torch.optim.AdamW(foreach=False)",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "lion": "a Lion optimizer",
}


def script_duties(plan: Plan, format: str, options: EmitOptions) -> tuple[str, ...]:
    """One sentence per duty, for the head of a file and for standard error; none where `dsplan run` does it all."""
    if format == "slurm" and plan.configuration.tp == plan.configuration.pp == 1:
        return ()
    return (
        *_degrees(plan, format),
        *_batch(plan, format),
        _loading(plan),
        *_products(plan, format),
        *_checkpointing(plan, format),
        *_parking(plan),
        *_travel(plan, format),
        *_optimizer(plan, format, options),
        *_reduction(plan, format),
        *_synchronisation(plan, format),
        *_ranks(format),
    )


def as_comment(duties: tuple[str, ...]) -> str:
    """The duties as comment lines of YAML and shell."""
    return "".join(("# The plan holds for a script that\n", *(f"#  - {duty}\n" for duty in duties)))


def _degrees(plan: Plan, format: str) -> tuple[str, ...]:
    configuration = plan.configuration
    if configuration.tp == 1 and configuration.pp == 1:
        return ()
    wanted = f"tensor parallel {configuration.tp}, pipeline parallel {configuration.pp}"
    if format == "accelerate":
        return (f"loads the model with tp_plan='auto' ({wanted})",)
    return (f"sets up {wanted}, because `dsplan run` cannot run such a plan yet",)


def _batch(plan: Plan, format: str) -> tuple[str, ...]:
    if format not in ("accelerate", *_LAUNCH_SCRIPTS):
        return ()
    configuration = plan.configuration
    return (
        f"takes {configuration.micro_batch_size} samples per rank and step, accumulated"
        f" {configuration.gradient_accumulation_steps} times (global batch {configuration.global_batch_size})",
    )


def _loading(plan: Plan) -> str:
    """transformers 5 loads a checkpoint in the dtype it was saved in unless told otherwise."""
    configuration = plan.configuration
    dtype = "bfloat16" if configuration.precision == "bf16-pure" else "float32"
    if is_zero(plan) and configuration.precision in words.MIXED_PRECISIONS:
        dtype = "float16" if configuration.precision == "fp16" else "bfloat16"
    attention = _ATTENTION[configuration.attention]
    return f"loads the model with dtype=torch.{dtype}, attn_implementation={attention!r}"


def _products(plan: Plan, format: str) -> tuple[str, ...]:
    """torchao's float8 and MX converters, where the format itself does not ask accelerate for them."""
    if plan.configuration.precision not in words.SCALED_PRECISIONS or converts_products(plan, format):
        return ()
    recipe = plan.workload.get("fp8_recipe") or "tensorwise"
    what = f"converts the linear layers of its blocks to {plan.configuration.precision} with the {recipe} recipe"
    return (f"{what} (torchao, or Transformer Engine) and computes in bf16 besides",)


def converts_products(plan: Plan, format: str) -> bool:
    """Whether a format has accelerate put torchao's layers in, whose only recipe there is by whole tensors."""
    return format == "accelerate" and not is_zero(plan) and plan.workload.get("fp8_recipe") == "tensorwise"


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
    in_json = name != "adamw-8bit" and not (name == "lion" and on_cpu(plan, options))
    if (format == "deepspeed" and in_json) or (format == "huggingface" and name != "adamw-forloop"):
        return ()
    return (f"uses {_OPTIMIZERS[name]}",)


def _reduction(plan: Plan, format: str) -> tuple[str, ...]:
    """accelerate's FSDP2 policy reduces gradients in the compute dtype; the plan counts fp32."""
    mixed = plan.configuration.precision in words.MIXED_PRECISIONS
    if format not in ("accelerate", "huggingface") or not _is_fsdp(plan) or not mixed:
        return ()
    return ("gets gradients reduced in the compute dtype, which is accelerate's policy; the plan counts fp32",)


def _synchronisation(plan: Plan, format: str) -> tuple[str, ...]:
    """accelerate keeps whole gradients while it accumulates unless it is told to reduce in every micro-batch."""
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
