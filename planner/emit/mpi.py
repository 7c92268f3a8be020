"""Plan -> an Open MPI command line, as a script that takes the training script and its arguments."""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, as_comment, node_layout, script_duties
from planner.types.plan import Plan

_SEVERAL_NODES = """
# Run this on one node. HOSTFILE names all of them (a line per node: `name slots=RANKS`), MASTER_ADDR is the first.
: "${HOSTFILE:?set HOSTFILE to a file with a line per node}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
export MASTER_ADDR
"""


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`mpirun.sh`: `bash mpirun.sh train.py ARGUMENTS`, for scripts that call `dsplan.initialize`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    several = _SEVERAL_NODES if nodes > 1 else ""
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
