#!/usr/bin/env bash
# zero1 on 64 ranks: bash nanotron.sh ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
#  - runs the modules of megatron; plan again with --code nanotron for this trainer's own
#  - is given the model's rope base, which a plan does not hold
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
export CUDA_DEVICE_MAX_CONNECTIONS=1
: "${NANOTRON:?set NANOTRON to a checkout of nanotron}"

exec torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$NANOTRON/run_train.py" --config-file nanotron.yaml "$@"
