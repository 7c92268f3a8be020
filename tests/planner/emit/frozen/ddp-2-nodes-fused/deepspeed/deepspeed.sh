#!/usr/bin/env bash
# ddp on 16 ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail

: "${HOSTFILE:?set HOSTFILE to a file with a line per node: name slots=GPUS}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
nodes=(--hostfile="$HOSTFILE" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
# Without ssh between nodes: run this on every node, with NODE_RANK counting the lines of HOSTFILE from 0.
if [ -n "${NODE_RANK:-}" ]; then nodes+=(--no_ssh --node_rank="$NODE_RANK"); fi

exec deepspeed --num_nodes=2 --num_gpus=8 "${nodes[@]}" "$@"
