"""Plan -> what starts ranks: torchrun, mpirun, SLURM's sbatch.

SLURM's words: sbatch(1), `--signal` and `--requeue`, and scontrol(1), `requeue`.
"""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, as_comment, device_resource, node_layout, script_duties
from planner.types.plan import Plan
from planner.types.plan_io import plan_text

# torchrun, which every trainer's own script below starts with too.

_EVERY_NODE = """
# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
"""


def torchrun(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`torchrun.sh`: `bash torchrun.sh train.py ARGUMENTS`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    return {"torchrun.sh": launch_script(plan, "torchrun.sh train.py", script_duties(plan, "torchrun", options))}


def launch_script(plan: Plan, call: str, duties: tuple[str, ...], *, head: str = "", arguments: str = "") -> str:
    """Return a shell script that starts torchrun on this node, called as `bash CALL ARGUMENTS`, duties at its head.

    `head` is what comes before the command, `arguments` what comes before those of the caller.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    several = _EVERY_NODE if node_layout(plan)[0] > 1 else ""
    return f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash {call} ARGUMENTS
{as_comment(duties)}set -euo pipefail
{several}{head}
exec {launch_command(plan)}{arguments} "$@"
"""


def launch_command(plan: Plan) -> str:
    """Return the command up to the training script, in one line; several nodes meet at `$MASTER_ADDR`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    if nodes == 1:
        return f"torchrun --standalone --nnodes=1 --nproc-per-node={per_node}"
    meeting = '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}"'
    return f"torchrun --nnodes={nodes} --nproc-per-node={per_node} {meeting}"


# Open MPI.

_HOSTFILE = """
# Run this on one node. HOSTFILE names all of them (a line per node: `name slots=RANKS`), MASTER_ADDR is the first.
: "${HOSTFILE:?set HOSTFILE to a file with a line per node}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
export MASTER_ADDR
"""


def mpi(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`mpirun.sh`: `bash mpirun.sh train.py ARGUMENTS`, for scripts that call `dsplan.initialize`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    several = _HOSTFILE if nodes > 1 else ""
    hosts = ' --hostfile "$HOSTFILE" -x MASTER_ADDR' if nodes > 1 else ""
    # --bind-to none: Open MPI would tie each rank, and the threads it starts, to one core.
    command = f"mpirun -np {nodes * per_node} --map-by ppr:{per_node}:node --bind-to none{hosts}"
    text = f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash mpirun.sh train.py ARGUMENTS
{as_comment(script_duties(plan, "mpi", options))}set -euo pipefail
{several}
exec {command} python -u "$@"
"""
    return {"mpirun.sh": text}


# SLURM, around `dsplan run --launcher slurm`, which starts the ranks and restarts them.

_PLAN_FILE = "plan.yaml"
_SAVE_SECONDS = 120
_FIRST_NODE = """
# The first node of the job is where the others meet; the port is the job's own, for nodes that several jobs share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
RDZV_ID=$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT RDZV_ID
"""


def slurm(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`slurm.sh` with `plan.yaml` beside it: `sbatch slurm.sh train.py ARGUMENTS`.

    A plan that splits the model, which `dsplan run` does not start, has one torchrun per node and no plan file.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    if plan.configuration.splits_model:
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
    meeting = _FIRST_NODE if node_layout(plan)[0] > 1 else ""
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
