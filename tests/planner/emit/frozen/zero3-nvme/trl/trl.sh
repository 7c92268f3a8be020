#!/usr/bin/env bash
# zero3 on 8 ranks: bash trl.sh ARGUMENTS
set -euo pipefail

exec trl sft --config trl.yaml --accelerate_config accelerate.yaml "$@"
