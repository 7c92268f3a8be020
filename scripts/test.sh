#!/usr/bin/env bash
# Sets up .venv, then lint, types, the site of docs/ (build/site) and the whole suite, three files at a time (tests wait for
# processes: that is what two cores can do); how many tests were skipped, and why, stands above pytest's summary, which is
# the last line.
# Arguments go to pytest: scripts/test.sh tests/dsplan -k cli
# Tests of pages need a browser, Debian's chromium or Chrome, those of a team's database a PostgreSQL server; where there is
# none, root with apt gets it.
source "$(dirname "$0")/setup.sh"
has_browser() { for name in chromium chromium-browser google-chrome; do command -v $name > /dev/null && return; done; return 1; }
has_server() { command -v postgres > /dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' > /dev/null; }
missing=()
has_browser || missing+=(chromium fonts-dejavu-core)
has_server || missing+=(postgresql)
if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } > /dev/null ||
        echo "${missing[*]} could not be installed: the tests that need them are skipped" >&2
fi
ruff check .
mypy
lint-imports --no-logo --no-cache
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile all that they import
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" < /dev/null
