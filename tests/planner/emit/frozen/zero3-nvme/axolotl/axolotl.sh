#!/usr/bin/env bash
# zero3 on 8 ranks: bash axolotl.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 -m axolotl.cli.train axolotl.yaml "$@"
