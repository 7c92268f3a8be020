#!/usr/bin/env bash
# What takes minutes and is not part of the suite: tests marked slow, start-up times, the time model on published runs.
source "$(dirname "$0")/setup.sh"
python -m pytest -m slow --ignore=tests/faults/test_faults_many.py < /dev/null # scripts/faults.sh runs those, for an hour
python scripts/bench_startup.py
python scripts/check_published.py
