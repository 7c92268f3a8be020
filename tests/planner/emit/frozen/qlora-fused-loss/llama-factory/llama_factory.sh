#!/usr/bin/env bash
# ddp on 8 ranks: bash llama_factory.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 -m llamafactory.launcher llama_factory.yaml "$@"
