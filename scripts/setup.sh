# Sourced by test.sh and demo.sh: goes to the repository root and makes .venv hold the pinned versions.
# A second run finds the stamp of the first and returns at once. PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TORCH_EXTENSIONS_DIR=$PWD/.venv/torch_extensions

die() { echo "setup: $*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer found (${PYTHON:-python3}); install one or name it: PYTHON=/path/to/python $0"
}

install() {
    local pip=".venv/bin/python -m pip --disable-pip-version-check --no-input"
    echo "setup: installing the pinned versions into .venv (some minutes the first time)" >&2
    $pip install -qq -c constraints.txt setuptools wheel
    $pip install -qq -c constraints.txt -e '.[train,dev]'
    # DeepSpeed looks for torch while it is built, and must not compile its CUDA extensions here.
    DS_BUILD_OPS=0 $pip install -qq -c constraints.txt --no-build-isolation -e '.[train,deepspeed,dev]'
    compile_extensions
}

# What DeepSpeed and the tests would otherwise compile at their first use, inside a test. It lies in .venv: a compile that
# was killed leaves a lock, for which every later one would wait, and goes with the environment that it was for.
compile_extensions() {
    echo "setup: compiling DeepSpeed's CPU operators (some minutes the first time)" >&2
    DS_ACCELERATOR=cpu PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -c "
from deepspeed.accelerator import get_accelerator
for name in ('CPUAdamBuilder', 'FusedAdamBuilder', 'ShareMemCommBuilder'):
    get_accelerator().create_op_builder(name).load(verbose=False)" >/dev/null 2>&1 ||
        echo "setup: they were not compiled here (is there a C++ compiler?)" >&2
    echo "setup: compiling the emulated device of the tests" >&2
    .venv/bin/python -c "
from tests.emulated_cuda import build, why_not_here
why_not_here() or build()" || echo "setup: it was not compiled here" >&2
}

python=$(find_python)
stamp=$( { "$python" -V; cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum )
if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
    "$python" -m venv --clear .venv
    install
    echo "$stamp" > .venv/stamp
fi
export PATH="$PWD/.venv/bin:$PATH"
