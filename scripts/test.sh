#!/usr/bin/env bash
# Sets up .venv, then lint, types, the site of docs/ (build/site) and the whole suite, three files at a time (tests wait for
# processes: that is what two cores can do); how many tests were skipped, and why, stands above pytest's summary, which is
# the last line.
# Arguments go to pytest: scripts/test.sh tests/dsplan -k cli
source "$(dirname "$0")/setup.sh"
ruff check .
mypy
lint-imports --no-logo --no-cache
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile all that they import
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" < /dev/null
