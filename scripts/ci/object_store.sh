#!/usr/bin/env bash
# Runs the tests of checkpoints on a real S3 server, moto's, and measures how fast they come there:
# `bash scripts/ci/object_store.sh [PYTEST ARGUMENTS]`. A quarter of an hour on two quiet cores; OBJECT_STORE_KILLS says
# how often ranks are killed in each of two ways of saving (20). Server and s3fs are installed into a temporary folder.
source "$(dirname "$0")/../setup.sh"

extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
python -m pip --disable-pip-version-check --no-input install -qq -c constraints.txt --target "$extra" 'moto[server]>=5.1' 's3fs>=2025.3'
export PYTHONPATH=$extra${PYTHONPATH:+:$PYTHONPATH}
python -m pytest -m slow -n 0 -rs tests/strategies/checkpoint/test_object_store_s3.py "$@" < /dev/null
python -m scripts.measure.object_store_speed
