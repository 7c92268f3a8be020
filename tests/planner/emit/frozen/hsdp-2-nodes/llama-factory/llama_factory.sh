#!/usr/bin/env bash
# hsdp on 16 ranks: bash llama_factory.sh ARGUMENTS
set -euo pipefail

# Run this on every node, with NODE_RANK counting them from 0 and MASTER_ADDR the address of the first.
: "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"

exec accelerate launch --config_file accelerate.yaml --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "${MASTER_PORT:-29500}" -m llamafactory.launcher llama_factory.yaml "$@"
