#!/usr/bin/env bash
# fsdp on 16 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - sets up tensor parallel 2, pipeline parallel 1, context parallel 2, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 32)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - converts the linear layers of its blocks to fp8 with the rowwise recipe (torchao, or Transformer Engine) and computes in bf16 besides
#  - has a chunked loss: logits of a part of the tokens at a time
#  - uses torch.optim.AdamW
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

exec torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
