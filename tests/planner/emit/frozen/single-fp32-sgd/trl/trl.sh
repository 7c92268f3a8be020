#!/usr/bin/env bash
# single on 1 ranks: bash trl.sh ARGUMENTS
set -euo pipefail

exec trl sft --config trl.yaml --accelerate_config accelerate.yaml "$@"
