#!/usr/bin/env bash
# ddp on 16 ranks: bash llama_factory.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

exec torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" -m llamafactory.launcher llama_factory.yaml "$@"
