"""Bodies of the processes that the tests of the database start, run as `python processes.py NAME PATH NUMBER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hardware_db.measurement import (
    HardwareKind,
    Measured,
    RateMeasurement,
    calibration_record,
    measure_run,
    new_id,
    utc_now,
)
from hardware_db.store import open_store, rows
from hardware_db.store.connection import connect, transaction
from tests.hardware_db.store.records import A100, plan

PROCESSES = 8
WRITES = 50
DATABASES = 20


def write_many(path: Path, number: int) -> None:
    """Adds one run at a time to the database that all processes make at once."""
    _meet(path, number)
    with open_store(path) as store:
        for step in range(WRITES):
            store.add(measure_run(plan(), A100, outcome="completed", measured=Measured(host_bytes=number, steps=step)))


def write_all_kinds(path: Path, number: int) -> None:
    """Adds runs, rates and calibrations by turns, as a benchmark of each process does; opening anew every time."""
    _meet(path, number)
    for step in range(WRITES):
        with open_store(path) as store:
            store.add(measure_run(plan(), A100, outcome="completed", measured=Measured(host_bytes=number, steps=step)))
            store.add(
                RateMeasurement(
                    id=new_id(),
                    created_at=utc_now(),
                    operation="matmul",
                    value=float(step),
                    unit="FLOP/s",
                    fingerprint=A100,
                    source="bench",
                    ranks=number + 1,
                )
            )
            hardware = HardwareKind(device=f"device {number}")
            store.add_calibration(calibration_record(hardware, {"rows": step}))


def make_many(path: Path, number: int) -> None:
    """Makes one new database after the other, each at the same moment as all other processes."""
    for turn in range(DATABASES):
        database = path.parent / str(turn) / path.name
        database.parent.mkdir(exist_ok=True)
        _meet(database, number)
        open_store(database).close()


def _meet(path: Path, number: int) -> None:
    """Waits until all processes have come to `path`, but not for ever: one of them may have failed."""
    deadline = time.monotonic() + 100
    (path.parent / f"here-{number}").touch()
    while len(list(path.parent.glob("here-*"))) < PROCESSES:
        if time.monotonic() > deadline:
            sys.exit("the other processes did not come")
        time.sleep(0.001)


def die_after_adding(path: Path, number: int) -> None:
    """Adds `number` runs and is killed without closing anything."""
    store = open_store(path)
    store.add(*(measure_run(plan(), A100, outcome="completed", measured=Measured()) for _ in range(number)))
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_adding(path: Path, number: int) -> None:
    """Is killed inside a transaction, after `number` of its records."""
    connection = connect(path)
    with transaction(connection):
        for _ in range(number):
            record = measure_run(plan(), A100, outcome="completed", measured=Measured())
            connection.execute(rows.INSERT_FINGERPRINT, rows.fingerprint_row(A100))
            connection.execute(rows.INSERT_MEASUREMENT, rows.measurement_row(record))
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
