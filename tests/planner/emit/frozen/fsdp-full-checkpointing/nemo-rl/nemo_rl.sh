#!/usr/bin/env bash
# fsdp on 8 ranks: bash nemo_rl.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
set -euo pipefail

: "${NEMO_RL:?set NEMO_RL to a checkout of NeMo-RL}"
export NEMO_RL
exec uv run --project "$NEMO_RL" "$NEMO_RL/examples/run_sft.py" --config nemo_rl.yaml "$@"
