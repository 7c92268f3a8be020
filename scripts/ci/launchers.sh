#!/usr/bin/env bash
# Runs the tests of every launcher on real software: `bash scripts/ci/launchers.sh [PYTEST ARGUMENTS]`. Minutes long.
# As root with apt it installs what is missing: SLURM with munge, Open MPI, iproute2. The tests start a SLURM of
# one node, network namespaces and Ray clusters for themselves, and leave nothing running.
# Ray is installed beside the environment, in .venv/ray: with it in there transformers and trl would import it too. So
# is SkyPilot, in .venv/sky, whose tests run by themselves: it needs older releases of click and uvicorn.
source "$(dirname "$0")/../setup.sh"

declare -A package=([srun]=slurm-wlm [munged]=munge [mpirun]=openmpi-bin [ip]=iproute2)
missing=()
for command in "${!package[@]}"; do
    command -v "$command" > /dev/null || [ -x "/usr/sbin/$command" ] || missing+=("${package[$command]}")
done
if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
    else
        echo "skipped are the tests that need ${missing[*]}: installing them takes root and apt" >&2
    fi
fi
python -c "import kubernetes, kubernetes_validate" 2> /dev/null ||
    python -m pip install -qq -c constraints.txt kubernetes 'kubernetes-validate>=1.37'
ray=$PWD/.venv/ray
if [ ! -d "$ray/ray" ]; then
    python -m pip --disable-pip-version-check install -qq --no-deps -c constraints.txt --target "$ray" ray
fi
export PYTHONPATH=$ray${PYTHONPATH:+:$PYTHONPATH}
sky=$PWD/.venv/sky
if [ ! -d "$sky/sky" ]; then
    python -m pip --disable-pip-version-check install -qq --target "$sky" 'skypilot==0.14.1'
fi
python -m pytest tests/strategies/launchers -m "slow or not slow" -rs --durations=0 --ignore-glob='*test_skypilot.py' \
    --ignore-glob='*test_skypilot_client.py' "$@" && status=0 || status=$?
PYTHONPATH=$sky SKYPILOT_DISABLE_USAGE_COLLECTION=1 python -m pytest -n 0 tests/strategies/launchers/test_skypilot.py \
    tests/strategies/launchers/test_skypilot_client.py tests/planner/emit/test_clouds.py -m "slow or not slow" -rs ||
    status=$?
exit $status
