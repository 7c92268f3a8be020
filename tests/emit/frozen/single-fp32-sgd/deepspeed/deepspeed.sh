#!/usr/bin/env bash
# single on 1 ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail

exec deepspeed --num_gpus=1 "$@"
