#!/usr/bin/env bash
# fsdp on 8 ranks: bash axolotl.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
#  - gets gradients reduced in the compute dtype, which is accelerate's policy; the plan counts fp32
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 -m axolotl.cli.train axolotl.yaml "$@"
