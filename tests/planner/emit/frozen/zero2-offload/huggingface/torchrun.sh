#!/usr/bin/env bash
# zero2 on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
#  - recomputes all but matrix products and attention; whole blocks would take less memory and more time
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
