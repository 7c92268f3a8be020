#!/usr/bin/env bash
# fsdp on 8 ranks: bash llama_factory.sh ARGUMENTS
set -euo pipefail

exec accelerate launch --config_file accelerate.yaml -m llamafactory.launcher llama_factory.yaml "$@"
