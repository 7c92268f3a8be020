#!/usr/bin/env bash
# fsdp on 8 ranks: bash ms_swift.sh ARGUMENTS
set -euo pipefail
export NPROC_PER_NODE=8

exec swift sft ms_swift.yaml "$@"
