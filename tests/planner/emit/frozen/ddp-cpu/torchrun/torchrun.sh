#!/usr/bin/env bash
# ddp on 2 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 16)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - uses torch.optim.AdamW
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=2 "$@"
