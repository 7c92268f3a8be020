#!/usr/bin/env bash
# Sets up .venv, then lint, types and the whole suite, two files at a time; pytest's summary is the last line.
# Arguments go to pytest: scripts/test.sh tests/front -k cli
source "$(dirname "$0")/setup.sh"
ruff check .
mypy
exec python -m pytest -n 2 --dist loadfile "$@" < /dev/null
