#!/usr/bin/env bash
# The tests of CUDA's branches: on an emulated device, compiled at the first call, or on the machine's own cards where its
# torch has CUDA. Arguments go to pytest: `scripts/ci/cuda.sh -m slow` runs the cases that are left to the long checks.
source "$(dirname "$0")/../setup.sh"
unset PYTHONDONTWRITEBYTECODE
exec python -m pytest -n 2 --dist loadfile tests/emulated_cuda tests/strategies/cuda "$@" < /dev/null
