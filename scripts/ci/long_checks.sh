#!/usr/bin/env bash
# What takes minutes and is not part of the suite: tests marked slow (among them all cases of the tables of which the
# suite runs some, see CONTRIBUTING.md), start-up times, the time model on published runs, the core of the suite on other
# versions of torch and transformers. scripts/ci/faults.sh runs the many faults, for an hour.
source "$(dirname "$0")/../setup.sh"
unset PYTHONDONTWRITEBYTECODE
python -m pytest -m slow -n 3 --dist loadfile --ignore=tests/strategies/faults/test_many.py --ignore=tests/strategies/launchers < /dev/null
python -m pytest -m slow tests/strategies/launchers < /dev/null # each with the machine to itself
python -m scripts.bench.startup
python -m scripts.report.check_published
scripts/ci/versions.sh
