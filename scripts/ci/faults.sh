#!/usr/bin/env bash
# The fault suite in full: every kind of fault under every strategy, at moments drawn over the whole run, on real
# processes; then a table of what became of the runs. An hour on four cores with -n 4. Arguments go to pytest:
# scripts/ci/faults.sh -n 4 -k "SIGTERM or agent"
# FAULT_MOMENTS says another number of faults per kind than 24; each kind meets each of its strategies at least once.
# FAULT_FIGURES names the file that keeps the figures of every run; a new one by default. Full disks need root.
source "$(dirname "$0")/../setup.sh"
FAULT_FIGURES=${FAULT_FIGURES:-$(mktemp)}
export FAULT_FIGURES
python -m pytest -m slow tests/strategies/faults/test_many.py "$@" < /dev/null && passed=0 || passed=$?
python -m scripts.report.fault_figures "$FAULT_FIGURES"
exit "$passed"
