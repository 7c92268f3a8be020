#!/usr/bin/env bash
# fsdp on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - sets up tensor parallel 2, pipeline parallel 2, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 16)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - uses torch.optim.AdamW
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
