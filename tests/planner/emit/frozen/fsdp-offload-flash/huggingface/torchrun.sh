#!/usr/bin/env bash
# fsdp on 8 ranks: bash torchrun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - loads the model with dtype=torch.float32, attn_implementation='flash_attention_2'
#  - gets gradients reduced in the compute dtype, which is accelerate's policy; the plan counts fp32
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 "$@"
