#!/usr/bin/env bash
# single on 1 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 8)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - uses torch.optim.SGD
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=1 "$@"
