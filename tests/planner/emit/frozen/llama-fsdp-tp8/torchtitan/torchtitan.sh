#!/usr/bin/env bash
# fsdp on 64 ranks: bash torchtitan.sh --training.steps N ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"

# torchtitan 0.2.2 reads the TOML; later ones take the Python file, with TITAN_CONFIG=python.
if [ "${TITAN_CONFIG:-toml}" = python ]; then
    export PYTHONPATH="$PWD:${PYTHONPATH:-}"
    set -- --module torchtitan_plan --config plan "$@"
else
    set -- --job.config_file torchtitan.toml "$@"
fi

exec torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" -m torchtitan.train "$@"
