#!/usr/bin/env bash
# ddp on 2 ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail

exec deepspeed --num_gpus=2 "$@"
