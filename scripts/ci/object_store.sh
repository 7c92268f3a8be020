#!/usr/bin/env bash
# Runs the tests of checkpoints on real servers, moto's of S3 and Azurite, and measures how fast they come to the first:
# `bash scripts/ci/object_store.sh [PYTEST ARGUMENTS]`. Half an hour on two quiet cores; OBJECT_STORE_KILLS says how
# often ranks are killed in each of two ways of saving (20). Servers, s3fs and adlfs are installed into a temporary
# folder; Azurite takes Node.js and npm, and without them its tests are skipped.
source "$(dirname "$0")/../setup.sh"

extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
grep -E '^(fsspec|s3fs|adlfs)==' constraints.txt > "$extra/pins.txt" # others of the set are too new for aiobotocore
python -m pip --disable-pip-version-check --no-input install -qq -c "$extra/pins.txt" --target "$extra" 'moto[server]>=5.1' s3fs adlfs
if command -v npm > /dev/null; then
    npm install --prefix "$extra" --silent --no-audit --no-fund --ignore-scripts azurite@3.37
    export AZURITE="node $extra/node_modules/azurite/dist/src/blob/main.js"
fi
export PYTHONPATH=$extra${PYTHONPATH:+:$PYTHONPATH}
python -m pytest -m slow -n 0 -rs tests/strategies/checkpoint/test_object_store_servers.py "$@" < /dev/null
python -m scripts.measure.object_store_speed
