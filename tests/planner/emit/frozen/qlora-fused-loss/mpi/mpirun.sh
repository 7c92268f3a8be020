#!/usr/bin/env bash
# ddp on 8 ranks: bash mpirun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 64)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - trains qlora adapters (rank 16, on all-linear) beside frozen weights, with PEFT
#  - loads frozen weights in nf4
#  - has a fused loss: Liger's, without logits
#  - uses bitsandbytes.optim.PagedAdamW8bit
#  - calls dsplan.initialize, or reads its rank from Open MPI's variables itself
set -euo pipefail

exec mpirun -np 8 --map-by ppr:8:node --bind-to none python -u "$@"
