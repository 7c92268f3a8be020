"""Plan -> a TrainJob for the Kubeflow trainer (v2, `trainer.kubeflow.org/v1alpha1`).

The trainer's torch runtime tells torchrun of nodes and ranks in `PET_` variables, so the command names neither.
Source of the fields: kubeflow/trainer, docs/proposals/2170-kubeflow-trainer-v2.
"""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, as_comment, device_resource, node_layout, script_duties
from planner.types.plan import Plan


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`trainjob.yaml`: `kubectl apply -f trainjob.yaml`, once the image and the script are named in it.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    resource = device_resource(plan, options)
    devices = f"    resourcesPerNode:\n      limits:\n        {resource}: {per_node}\n" if resource else ""
    duties = as_comment(script_duties(plan, "kubernetes", options))
    text = f"""# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: kubectl apply -f trainjob.yaml
{duties}# Name an image that has the script, torch and dsplan, and the script with its arguments.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: dsplan-{plan.configuration.strategy}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: IMAGE
    command: [torchrun, train.py]
    numNodes: {nodes}
    numProcPerNode: {per_node}
{devices}"""
    return {"trainjob.yaml": text}
