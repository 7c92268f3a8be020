"""Stores what ranks on this machine's cards would measure before a first plan, which takes emulated ones a minute."""

from __future__ import annotations

from hardware_db.fingerprint import fingerprint
from hardware_db.microbench.grid import GPU, Rate, as_measurement, quick_points
from hardware_db.store import open_store
from strategies.run_directory.machine import own_machine

RATES = {
    "matmul": (4e14, "FLOP/s"),
    "memory": (2e12, "bytes/s"),
    "cpu_adamw": (1.5e9, "parameters/s"),
    "host_to_device": (2e10, "bytes/s"),
    "all_reduce_latency": (2e-5, "s"),
    "all_reduce": (2e11, "bytes/s"),
}

if __name__ == "__main__":
    machine = fingerprint(own_machine())
    points = [point for ranks in (1, 2) for point in quick_points(GPU, ranks)]
    rates = (Rate(point=point, value=RATES[point.operation][0], unit=RATES[point.operation][1]) for point in points)
    with open_store() as store:
        store.add(*(as_measurement(rate, machine, "run") for rate in rates))
