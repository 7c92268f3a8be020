#!/usr/bin/env bash
# The core of the suite on other torch and transformers than the pinned ones: the least that dsplan declares, one
# between, and the pinned torch. Each pair has an environment of its own in build/versions, of gigabytes (torch's CUDA
# builds), which later calls find again. Arguments name other pairs: scripts/ci/versions.sh 2.9:5.0 2.13.0:5.23.0
set -euo pipefail
cd "$(dirname "$0")/../.."
pairs=("$@")
[ ${#pairs[@]} -gt 0 ] || pairs=("2.9.*:4.57.*" "2.9.*:5.*" "2.13.*:4.57.*" "2.13.*:5.*")
core=(tests/strategies/torch_compat tests/strategies/backends/test_contract.py
    tests/strategies/checkpoint/test_checkpoint_contents.py tests/strategies/parallel/test_pipeline.py
    tests/strategies/parallel/test_split_layers.py)
failed=()
for pair in "${pairs[@]}"; do
    torch=${pair%%:*} transformers=${pair#*:}
    home="build/versions/${pair//[:*]/_}"
    if [ ! -e "$home/complete" ]; then
        "${PYTHON:-python3}" -m venv --clear "$home"
        "$home/bin/python" -m pip install -q "torch==$torch" "transformers==$transformers" 'numpy>=1.26' 'accelerate>=1.12' \
            'safetensors>=0.5' 'msgspec>=0.20' 'psutil>=6.0' 'pyyaml>=6.0' 'rich>=13.9' 'typer>=0.20,<0.29' \
            'nvidia-ml-py>=12.560' 'pytest>=8.3' 'pytest-timeout>=2.3' 'pytest-xdist>=3.8' 'hypothesis>=6.120' 'peft>=0.17'
        touch "$home/complete"
    fi
    echo "versions: torch $torch, transformers $transformers"
    PYTHONPATH=$PWD CUDA_VISIBLE_DEVICES='' "$home/bin/python" -m pytest -p no:cacheprovider -n 2 -k 'not deepspeed' \
        "${core[@]}" < /dev/null || failed+=("$pair")
done
[ ${#failed[@]} -eq 0 ] || { echo "versions: failed with ${failed[*]}" >&2; exit 1; }
