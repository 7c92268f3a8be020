"""Plan -> a torchrun command line, as a script that takes the training script and its arguments."""

from __future__ import annotations

from planner.emit.common import DEFAULTS, EmitOptions, as_comment, node_layout, script_duties
from planner.types.plan import Plan

_SEVERAL_NODES = """
# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
"""


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`torchrun.sh`: `bash torchrun.sh train.py ARGUMENTS`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    return launch_script(plan, script_duties(plan, "torchrun", options))


def launch_script(plan: Plan, duties: tuple[str, ...]) -> dict[str, str]:
    """`torchrun.sh` with these duties at its head.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    several = _SEVERAL_NODES if node_layout(plan)[0] > 1 else ""
    text = f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash torchrun.sh train.py ARGUMENTS
{as_comment(duties)}set -euo pipefail
{several}
exec {launch_command(plan)} "$@"
"""
    return {"torchrun.sh": text}


def launch_command(plan: Plan) -> str:
    """The command up to the training script, in one line; several nodes meet at `$MASTER_ADDR`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    if nodes == 1:
        return f"torchrun --standalone --nnodes=1 --nproc-per-node={per_node}"
    meeting = '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}"'
    return f"torchrun --nnodes={nodes} --nproc-per-node={per_node} {meeting}"
