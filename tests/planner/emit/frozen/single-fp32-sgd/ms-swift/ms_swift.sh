#!/usr/bin/env bash
# single on 1 ranks: bash ms_swift.sh ARGUMENTS
set -euo pipefail
export NPROC_PER_NODE=1

exec swift sft ms_swift.yaml "$@"
