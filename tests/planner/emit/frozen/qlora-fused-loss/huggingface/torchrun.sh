#!/usr/bin/env bash
# ddp on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - trains qlora adapters (rank 16, on all-linear) beside frozen weights, with PEFT
#  - loads frozen weights in nf4
#  - has a fused loss: Liger's, without logits
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
