"""Writes what `dsplan bench` found on this machine beside the step times that are shipped.

    python -m scripts.measure.keep_bench                    # from the database to rates_cpu.csv and times_bench_cpu.csv
    python -m scripts.measure.keep_bench --device cuda      # the same of this machine's GPU

Run it after `dsplan bench` (`--ranks 2,4` on a CPU) and before `times.py`, on a machine without other work.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from dsplan.diagnostics.bench.cases import training_cases
from hardware_db.fingerprint import fingerprint
from hardware_db.measured_rows import TimeRun, write_time_runs
from hardware_db.measurement import Measurement
from hardware_db.probe import probe
from hardware_db.store import open_store
from planner.cluster.probed import probed_cluster
from planner.types.plan_io import configuration_from_dict
from scripts.measure.memory import place_of
from scripts.measure.rate_rows import write_rates
from scripts.measure.real_times import files_of
from scripts.measure.times import threads_of


def main() -> None:
    """Keep what `dsplan bench` measured here as rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    machine = probe()
    columns = place_of(machine, device).columns
    key = fingerprint(machine)
    cluster = probed_cluster(machine, ranks=2 if device == "cpu" else 1)
    configs = {case.model: case.config for case in training_cases(cluster)}
    files = files_of(columns["device"])
    with open_store() as store:
        rates = store.rates(key.key)
        runs = [
            measurement
            for measurement in store.list(outcome="completed")
            if measurement.source == "bench" and measurement.fingerprint == key
        ]
    newest = {run.plan_key: run for run in reversed(runs)}.values()
    write_rates(files.rates, rates)
    write_time_runs(
        files.training, [_row(measurement, configs, columns) for measurement in newest if measurement.model in configs]
    )
    print(f"{len(rates)} rates in {files.rates.name}, {len(newest)} runs in {files.training.name}")


def _row(run: Measurement, configs: dict[str, Any], columns: Any) -> TimeRun:
    plan: Any = run.plan
    configuration = configuration_from_dict(plan["plan"])
    measured = run.measured
    seconds = measured.step_seconds or 0.0
    return TimeRun(
        **columns,
        **asdict(configuration),
        model=run.model,
        config=json.dumps(configs[run.model]),
        task=plan["workload"]["task"],
        ranks_per_device=1,
        memory_limit_bytes=0,
        threads=threads_of(columns, configuration.world_size),
        outcome="completed",
        rounds=1,
        steps=measured.steps,
        step_seconds=round(seconds, 6),
        fastest_seconds=round(measured.step_seconds_low or seconds, 6),
        slowest_seconds=round(measured.step_seconds_high or seconds, 6),
    )


if __name__ == "__main__":
    main()
