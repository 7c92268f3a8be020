#!/usr/bin/env bash
# ddp on 8 ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail

# A free port where none is named: the launcher's own, 29500, may be another run's.
free='import socket; found = socket.socket(); found.bind(("", 0)); print(found.getsockname()[1])'
port=${MASTER_PORT:-$(python -c "$free")}

exec deepspeed --num_gpus=8 --master_port="$port" "$@"
