#!/usr/bin/env bash
# zero1 on 1024 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - sets up tensor parallel 1, pipeline parallel 16, expert parallel 64, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 32 times (global batch 4096)
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
#  - calls model.gradient_checkpointing_enable()
#  - uses torch.optim.AdamW
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

exec torchrun --nnodes=128 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
