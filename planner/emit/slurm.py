"""Plan -> a SLURM batch script around `dsplan run --launcher slurm`, which starts the ranks and restarts them.

SLURM's words: sbatch(1), `--signal` and `--requeue`, and scontrol(1), `requeue`.
"""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, as_comment, device_resource, node_layout, script_duties
from planner.emit.torchrun import launch_command
from planner.types.plan import Plan
from planner.types.plan_io import plan_text

_PLAN_FILE = "plan.yaml"
_SAVE_SECONDS = 120
_MEETING = """
# The first node of the job is where the others meet; the port is the job's own, for nodes that several jobs share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
RDZV_ID=$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT RDZV_ID
"""


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`slurm.sh` with `plan.yaml` beside it: `sbatch slurm.sh train.py ARGUMENTS`.

    A plan that splits layers, which `dsplan run` does not start, has one torchrun per node and no plan file.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    if plan.configuration.tp > 1 or plan.configuration.pp > 1:
        return {"slurm.sh": _under_torchrun(plan, options)}
    return {"slurm.sh": _under_dsplan(plan, options), _PLAN_FILE: plan_text(plan)}


def _under_dsplan(plan: Plan, options: EmitOptions) -> str:
    nodes, per_node = node_layout(plan)
    return f"""{_head(plan, options, tasks_per_node=per_node)}#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{_SAVE_SECONDS}
# {_SAVE_SECONDS} seconds before its time is up, or when another job takes its place, it saves and is queued again.
set -uo pipefail

run_directory=${{RUN_DIRECTORY:-$PWD/dsplan-$SLURM_JOB_ID}}  # on a file system that all nodes share
if [ -e "$run_directory/launch.json" ]; then
    arguments=(--resume "$run_directory")
else
    arguments=(--run-dir "$run_directory" --plan {_PLAN_FILE} --launcher slurm --nodes {nodes})
    arguments+=(--grace-seconds {_SAVE_SECONDS - 20} "$@")
fi
dsplan run "${{arguments[@]}}" &
trap 'kill -USR1 $!' USR1 TERM
while true; do
    wait $!
    status=$?
    # A trap ends `wait` with 128 and the signal's number; then the run is still saving.
    if [ "$status" -ne 138 ] && [ "$status" -ne 143 ]; then break; fi
done
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def _under_torchrun(plan: Plan, options: EmitOptions) -> str:
    meeting = _MEETING if node_layout(plan)[0] > 1 else ""
    # --cpu-bind: SLURM would give the node's one task, and with it all ranks, a single core.
    duties = as_comment(script_duties(plan, "slurm", options))
    return f"""{_head(plan, options, tasks_per_node=1)}{duties}set -euo pipefail
{meeting}
exec srun --kill-on-bad-exit=1 --cpu-bind=none {launch_command(plan)} "$@"
"""


def _head(plan: Plan, options: EmitOptions, *, tasks_per_node: int) -> str:
    nodes, per_node = node_layout(plan)
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device_resource(plan, options) else ""
    return f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: sbatch slurm.sh train.py ARGUMENTS
#SBATCH --job-name=dsplan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks_per_node}
{gpus}#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
"""
