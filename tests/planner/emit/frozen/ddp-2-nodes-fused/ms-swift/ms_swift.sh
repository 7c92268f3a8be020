#!/usr/bin/env bash
# ddp on 16 ranks: bash ms_swift.sh ARGUMENTS
set -euo pipefail

# Run this on every node, with NODE_RANK counting them from 0 and MASTER_ADDR the address of the first.
: "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"
export NNODES=2 NODE_RANK MASTER_ADDR
export NPROC_PER_NODE=8

exec swift sft ms_swift.yaml "$@"
