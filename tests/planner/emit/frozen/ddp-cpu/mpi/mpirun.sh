#!/usr/bin/env bash
# ddp on 2 ranks: bash mpirun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 16)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - uses torch.optim.AdamW
#  - calls dsplan.initialize, or reads its rank from Open MPI's variables itself
set -euo pipefail

exec mpirun -np 2 --map-by ppr:2:node --bind-to none python -u "$@"
