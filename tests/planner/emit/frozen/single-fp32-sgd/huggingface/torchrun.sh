#!/usr/bin/env bash
# single on 1 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=1 "$@"
