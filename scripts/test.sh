#!/usr/bin/env bash
# Sets up .venv, then lint and the whole suite, three files at a time (tests wait for processes: that is what two cores can
# do), and beside it types and the site of docs/ (build/site), which print what they complain of after it. How many tests
# were skipped, and why, stands above pytest's summary, which is the last line otherwise.
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
lint-imports --no-logo --no-cache
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile all that they import
log=$(mktemp)
mkdir -p build # made before the tests, each of which looks for what it left behind
trap 'rm -f "$log"' EXIT
{ mypy && NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet; } < /dev/null > "$log" 2>&1 & # a minute, while tests wait
lint=$!
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" < /dev/null && status=0 || status=$?
wait $lint || { cat "$log"; exit 1; }
exit $status
