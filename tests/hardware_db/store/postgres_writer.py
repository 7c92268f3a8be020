"""Adds runs through several connections and writes down each that was acknowledged.

python postgres_writer.py ADDRESS CONNECTIONS SECONDS FOLDER NUMBER
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from hardware_db.measurement import Measured, measure_run
from hardware_db.store.postgres import PostgresStore
from tests.hardware_db.store.records import A100, plan

ADDRESS, CONNECTIONS, SECONDS, FOLDER, NUMBER = sys.argv[1:]
until = time.monotonic() + float(SECONDS)


def write(connection: int) -> None:
    with (
        PostgresStore(ADDRESS) as store,
        Path(FOLDER, f"rows-{NUMBER}-{connection}").open("w", encoding="utf-8") as acknowledged,
    ):
        step = 0
        while time.monotonic() < until:
            run = measure_run(plan(), A100, outcome="completed", measured=Measured(steps=step))
            store.add(run)
            acknowledged.write(f"{run.id}\n")
            acknowledged.flush()
            step += 1


threads = [threading.Thread(target=write, args=(connection,)) for connection in range(int(CONNECTIONS))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
