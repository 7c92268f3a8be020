#!/usr/bin/env bash
# fsdp on 64 ranks: bash torchrun.sh bridge_plan.py ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
#  - runs the modules of torchtitan; plan again with --code megatron for this trainer's own
#  - recomputes all but matrix products and attention; the trainer's own choice is another
#  - compiles its blocks, for which the trainer has no setting
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

exec torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
