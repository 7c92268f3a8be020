"""Plan -> a SLURM batch script: one torchrun per node, which starts that node's ranks."""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, device_resource, node_layout
from planner.emit.duties import as_comment, script_duties
from planner.emit.torchrun import torchrun_command
from planner.plan import Plan

_MEETING = """
# The first node of the job is where the others meet; the port is the job's own, for nodes that several jobs share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
RDZV_ID=$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT RDZV_ID
"""


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`slurm.sh`: `sbatch slurm.sh train.py ARGUMENTS`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device_resource(plan, options) else ""
    meeting = _MEETING if nodes > 1 else ""
    # --cpu-bind: SLURM would give the node's one task, and with it all ranks, a single core.
    text = f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: sbatch slurm.sh train.py ARGUMENTS
#SBATCH --job-name=dsplan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
{as_comment(script_duties(plan, "slurm", options))}set -euo pipefail
{meeting}
exec srun --kill-on-bad-exit=1 --cpu-bind=none {torchrun_command(plan)} "$@"
"""
    return {"slurm.sh": text}
