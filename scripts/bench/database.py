"""Measures what a large shared database costs a plan: what `recommend` asks of 10 and of 100,000 runs, in turn.

    python -m scripts.bench.database [--rows N] [--rounds N]

Starts a PostgreSQL server of its own from the system's packages. The runs are those of this machine and of the model
that is asked for, the case in which most of them are looked through. Prints median milliseconds of connecting and
asking, of the clock and of this process, and the median difference of pairs; the rest of `recommend` knows of no rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measured, measure_run
from hardware_db.probe import probe
from hardware_db.store.postgres import PostgresStore
from planner.search.recall import recall_from
from planner.search.request import Request
from tests.hardware_db.store.server import Server, running_server
from tests.planner.search.questions import question

_QUESTION = ("--model", "gpt2", "--gpu", "a100-80gb", "--gpus", "8")
_ESTIMATE = (sys.executable, "-m", "dsplan", "estimate", *_QUESTION, "--strategy", "ddp", "--micro-batch=8", "--json")
_FEW = 10


def fill(server: Server, rows: int) -> str:
    """Return the address of a database with so many runs of the model on this machine."""
    document = json.loads(subprocess.run(_ESTIMATE, check=True, stdout=subprocess.PIPE).stdout)
    measured = Measured(step_seconds=1.0, steps=20)
    run = measure_run(document, fingerprint(probe()), outcome="completed", measured=measured)
    address = server.empty()
    with PostgresStore(address) as store:
        store.add(run)
    schema = address.rpartition("%3D")[2]
    others = _other_columns(address)
    # Plans that were predicted at other times differ in what was predicted of them.
    plan = """regexp_replace(plan, '"step_seconds":[0-9.]+', '"step_seconds":' || (1 + number / 1e6))"""
    made_at = """to_char(now() - number * interval '1 minute', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    server.execute(
        f"INSERT INTO {schema}.measurements (id, created_at, {', '.join(others)})"
        f" SELECT md5(number::text), {made_at}, {', '.join(plan if name == 'plan' else name for name in others)}"
        f" FROM {schema}.measurements, generate_series(1, {rows - 1}) AS number"
    )
    server.execute(f"ANALYZE {schema}.measurements")
    return address


def _other_columns(address: str) -> list[str]:
    import psycopg

    with psycopg.connect(address) as connection:
        columns = connection.execute("SELECT * FROM measurements LIMIT 0").description or []
    return [column.name for column in columns if column.name not in ("id", "created_at")]


def timed(address: str, request: Request) -> tuple[float, float]:
    """Return the seconds, and those of this process's CPU, in which a plan gets what the database knows of it."""
    started, used = time.perf_counter(), time.process_time()
    with PostgresStore(address) as store:
        answer = recall_from(store, request)
    seconds = time.perf_counter() - started, time.process_time() - used
    assert answer.experience.known_runs, "the runs were not looked through"
    return seconds


def main() -> None:
    """Print both medians and the difference between pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="runs in the large database")
    parser.add_argument("--rounds", type=int, default=15, help="questions per database, in turn")
    arguments = parser.parse_args()
    request = question("gpt2", "a100-80gb", 8)
    request = replace(request, cluster=replace(request.cluster, machine=probe()))
    with running_server() as server:
        few, many = fill(server, _FEW), fill(server, arguments.rows)
        pairs = [(timed(few, request), timed(many, request)) for _ in range(arguments.rounds + 1)][1:]
    for kind, name in enumerate(("clock", "CPU")):
        few_ms, many_ms = (1000 * statistics.median(pair[index][kind] for pair in pairs) for index in (0, 1))
        difference = 1000 * statistics.median(more[kind] - less[kind] for less, more in pairs)
        print(f"{name}: {_FEW} runs {few_ms:.1f}, {arguments.rows} runs {many_ms:.1f}, pairs {difference:+.1f} ms")


if __name__ == "__main__":
    main()
