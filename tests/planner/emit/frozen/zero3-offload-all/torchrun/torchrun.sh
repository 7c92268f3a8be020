#!/usr/bin/env bash
# zero3 on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 64)
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
#  - calls model.gradient_checkpointing_enable()
#  - uses torch.optim.AdamW
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
