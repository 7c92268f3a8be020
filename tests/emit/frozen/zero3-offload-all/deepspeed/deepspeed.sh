#!/usr/bin/env bash
# zero3 on 8 ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail

exec deepspeed --num_gpus=8 "$@"
