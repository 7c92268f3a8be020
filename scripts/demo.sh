#!/usr/bin/env bash
# Sets up .venv, prints the plans for a 6.7B model on 8 GPUs, then trains the example for real on this machine.
source "$(dirname "$0")/setup.sh"
dsplan recommend --model opt-6.7b --gpus 8
echo
dsplan run --nproc "${NPROC:-2}" scripts/examples/train_gpt.py "$@" < /dev/null
