"""What a config needs beyond the plan, and what every format asks of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from planner import vocabulary as words
from planner.errors import ContradictoryRequest
from planner.plan import Plan


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
