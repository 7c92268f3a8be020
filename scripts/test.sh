#!/usr/bin/env bash
# Sets up .venv, then lint, types, the site of docs/ (build/site) and the whole suite, three files at a time (tests wait for
# processes: that is what two cores can do); how many tests were skipped, and why, stands above pytest's summary, which is
# the last line.
# Arguments go to pytest: scripts/test.sh tests/dsplan -k cli
# Tests of pages need a browser, Debian's chromium or Chrome; where there is none, root with apt gets it.
source "$(dirname "$0")/setup.sh"
has_browser() { for name in chromium chromium-browser google-chrome; do command -v $name > /dev/null && return; done; return 1; }
if ! has_browser && [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } > /dev/null ||
        echo "chromium could not be installed: the tests of pages are skipped" >&2
fi
ruff check .
mypy
lint-imports --no-logo --no-cache
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile all that they import
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" < /dev/null
