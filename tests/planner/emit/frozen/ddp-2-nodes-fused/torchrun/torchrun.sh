#!/usr/bin/env bash
# ddp on 16 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 128)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - uses torch.optim.AdamW(fused=True)
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

exec torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
