"""Plan -> DeepSpeed's launcher, as a script that takes the training script and its arguments.

Several nodes are named in a host file (`name slots=GPUS` per line). The launcher reaches them by ssh from one of them;
where NODE_RANK is set the script runs on every node and starts that node's ranks alone.
"""

from __future__ import annotations

from planner.emit.common import node_layout
from planner.plan import Plan

_ONE_NODE = """
# A free port where none is named: the launcher's own, 29500, may be another run's.
free='import socket; found = socket.socket(); found.bind(("", 0)); print(found.getsockname()[1])'
port=${MASTER_PORT:-$(python -c "$free")}
"""
_SEVERAL_NODES = """
: "${HOSTFILE:?set HOSTFILE to a file with a line per node: name slots=GPUS}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
nodes=(--hostfile="$HOSTFILE" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
# Without ssh between nodes: run this on every node, with NODE_RANK counting the lines of HOSTFILE from 0.
if [ -n "${NODE_RANK:-}" ]; then nodes+=(--no_ssh --node_rank="$NODE_RANK"); fi
"""


def launch_script(plan: Plan) -> dict[str, str]:
    """`deepspeed.sh`: `bash deepspeed.sh train.py --deepspeed_config deepspeed.json`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    ranks = f"--num_gpus={per_node}"
    where = f'--num_nodes={nodes} {ranks} "${{nodes[@]}}"' if nodes > 1 else f'{ranks} --master_port="$port"'
    text = f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail
{_SEVERAL_NODES if nodes > 1 else _ONE_NODE}
exec deepspeed {where} "$@"
"""
    return {"deepspeed.sh": text}
