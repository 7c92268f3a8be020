#!/usr/bin/env bash
# zero1 on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
