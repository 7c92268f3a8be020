"""Particulars of the database that a team shares; the conformance suite runs on it as on the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsplan.__main__ import main
from hardware_db.errors import DsplanError
from hardware_db.files import without_password
from hardware_db.measurement import Measured
from hardware_db.store import add_or_keep, open_own_store, open_store
from hardware_db.store.postgres import MIGRATIONS
from tests.hardware_db.store.records import FROZEN, measurement, report
from tests.hardware_db.store.server import Server, running_server
from tests.strategies.launch.command import start_run

WRITER = Path(__file__).with_name("postgres_writer.py")
NOBODY = "postgresql://somebody:secret@localhost:1/none?sslpassword=other"


@pytest.fixture
def shared(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty database, which every command uses."""
    address = server.empty()
    monkeypatch.setenv("DSPLAN_DATABASE", address)
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    return address


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a server that is not there."""
    pytest.importorskip("psycopg")
    monkeypatch.setenv("DSPLAN_DATABASE", NOBODY)
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("shared")
def test_commands_use_the_shared_database_and_leave_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with open_store() as store:
        store.add(*FROZEN)
        run = store.list()[0]
        origin = store.origin(run.id)
        assert store.origin("0" * 32) is None
    assert origin is not None
    assert origin.host == os.uname().nodename
    assert main(["db", "show", run.id]) == 0
    assert f"added by {origin.user} on {origin.host}" in capsys.readouterr().out
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("shared")
def test_own_runs_go_there_and_others_come_back_once(capsys: pytest.CaptureFixture[str]) -> None:
    with open_own_store() as own:
        own.add(measurement(1), measurement(2))
    with open_store() as team:
        team.add(measurement(2), measurement(3))
    assert main(["db", "push"]) == 0
    assert "1 records added to postgresql://dsplan@/postgres" in capsys.readouterr().out
    assert main(["db", "pull"]) == 0
    assert "1 records added to" in capsys.readouterr().out
    with open_store() as team, open_own_store() as own:
        assert team.list() == own.list() == tuple(measurement(number) for number in (3, 2, 1))


@pytest.mark.usefixtures("unreachable")
def test_a_run_is_kept_where_the_server_cannot_be_reached() -> None:
    with pytest.raises(DsplanError) as caught:
        open_store()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("postgresql://somebody@localhost:1/none: ")
    assert "secret" not in str(caught.value)
    where = add_or_keep(measurement(1))
    assert "dsplan.db, to be sent with `dsplan db push` (postgresql://somebody@localhost:1/none: " in where
    with open_own_store() as own:
        assert own.list() == (measurement(1),)


def test_no_secret_of_an_address_is_shown() -> None:
    assert without_password(NOBODY) == "postgresql://somebody@localhost:1/none"
    assert without_password("postgresql://host/name?sslmode=require") == "postgresql://host/name?sslmode=require"


@pytest.mark.parametrize("address", ["mysql://host/name", "http://host"])
def test_other_servers_are_refused_in_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPLAN_DATABASE", address)
    assert main(["db", "list"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "is no database that dsplan knows" in error


def test_a_role_that_may_only_read_plans_and_adds_nothing(
    shared: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store() as store:
        store.add(measurement(1))
        store.report(report(1))
    schema = shared.rpartition("%3D")[2]
    server.execute(
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'reader')"
        " THEN CREATE ROLE reader LOGIN; END IF; END $$"
    )
    server.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader")
    server.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader")
    monkeypatch.setenv("DSPLAN_DATABASE", server.address(user="reader", schema=schema))
    with open_store() as store:
        assert store.list() == (measurement(1),)
        assert store.reports() == (report(1),)
        with pytest.raises(DsplanError, match="permission denied for table fingerprints; ask for a role that may"):
            store.add(measurement(2))
        with pytest.raises(DsplanError, match="permission denied for table reports; ask for a role that may"):
            store.report(report(2))


def test_a_newer_schema_is_left_alone(shared: str, server: Server) -> None:
    open_store().close()
    server.execute(f"UPDATE {shared.rpartition('%3D')[2]}.dsplan_schema SET version = 99")
    with pytest.raises(DsplanError, match="schema 99 was written by a newer dsplan"):
        open_store()


@pytest.mark.parametrize("release", [1, 2])
def test_a_database_of_an_earlier_release_gets_what_it_lacks(
    shared: str, server: Server, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("hardware_db.store.postgres.MIGRATIONS", MIGRATIONS[:release])
        with open_store() as store:
            store.add(measurement(1))
    with open_store() as store:
        assert store.list() == (measurement(1),)
        store.report(report(1))
    server.execute(f"UPDATE {shared.rpartition('%3D')[2]}.reports SET heard_at = heard_at - 90")
    with open_store() as store:
        assert store.reports()[0].heard_seconds_ago == pytest.approx(90, abs=5)


def test_runs_without_memory_are_looked_up_and_not_looked_for(shared: str) -> None:
    """Of 100,000 runs of one size that all completed none is read for those that did not."""
    import psycopg

    open_store().close()
    with psycopg.connect(shared) as connection:
        connection.execute("SET enable_seqscan = off")
        conditions = "parameters = 1 AND outcome = 'out_of_memory' ORDER BY created_at DESC, id DESC LIMIT 200"
        plan = connection.execute(f"EXPLAIN SELECT id FROM measurements WHERE {conditions}").fetchall()
    text = "\n".join(line for (line,) in plan)
    assert "Index Cond: ((parameters = 1) AND (outcome = 'out_of_memory'::text))" in text
    assert "Sort" not in text


@pytest.mark.usefixtures("shared")
def test_many_who_come_first_make_the_tables_once() -> None:
    problems: list[BaseException] = []

    def come() -> None:
        try:
            with open_store() as store:
                store.add(measurement(1))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    with open_store() as store:
        assert store.list() == (measurement(1),)


@pytest.fixture
def durable_server() -> Iterator[Server]:
    with running_server(durable=True) as started:
        yield started


@pytest.mark.parametrize(
    ("writers", "connections", "seconds", "kills"),
    [pytest.param(2, 2, 3.0, 1, id="some"), pytest.param(16, 4, 60.0, 3, id="many", marks=pytest.mark.slow)],
)
def test_every_acknowledged_row_outlives_a_killed_server(
    durable_server: Server, tmp_path: Path, writers: int, connections: int, seconds: float, kills: int
) -> None:
    address = durable_server.empty()
    with open_store_at(address) as store:
        assert store.count() == 0
    command = [sys.executable, str(WRITER), address, str(connections), str(seconds), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(writers)
    ]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("rows-*"))) < writers * connections:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(kills):
        time.sleep(seconds / (kills + 1))
        durable_server.kill()
        durable_server.start()
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert errors == [""] * writers
    acknowledged = {line for path in tmp_path.glob("rows-*") for line in path.read_text().splitlines()}
    with open_store_at(address) as store:
        stored = {run.id for run in store.list()}
    assert len(acknowledged) > writers * connections
    assert acknowledged <= stored
    print(f"{len(acknowledged)} rows acknowledged, {len(stored)} stored")


def open_store_at(address: str):  # type: ignore[no-untyped-def]
    from hardware_db.store.postgres import PostgresStore

    return PostgresStore(address)


@pytest.mark.usefixtures("shared")
def test_figures_of_any_size_come_back() -> None:
    run = measurement(1, measured=Measured(host_bytes=2**53, step_seconds=1e-300, first_loss=-0.0, steps=0))
    with open_store() as store:
        store.add(run)
        assert store.get(run.id) == run


TRAINS = """
import time
import torch
import dsplan

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return ((self.line(x) - y) ** 2).mean()

data = [(torch.randn(8), torch.zeros(1)) for _ in range(8 * 60)]
engine, _, loader, _ = dsplan.initialize(
    model=Model(), training_data=data, config={"train_batch_size": 8}
)
for x, y in loader:
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    print("loss", repr(loss.item()), flush=True)
    time.sleep(0.1)
"""


@pytest.mark.timeout(900)
@pytest.mark.slow  # three runs of one rank, and a minute until one that was killed counts as silent
def test_runs_of_a_team_are_listed_and_a_server_s_death_is_none_of_theirs(
    durable_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    address = durable_server.empty()
    monkeypatch.setenv("DSPLAN_DATABASE", address)

    def listed() -> dict[str, dict[str, Any]]:
        capsys.readouterr()
        assert main(["watch", "--runs", address, "--json"]) == 0
        return {row["run"]: row for row in json.loads(capsys.readouterr().out)["runs"]}

    def start(name: str) -> subprocess.Popen[str]:
        process = start_run("--nproc", "1", "--run-dir", name, "train.py", cwd=tmp_path)
        request.addfinalizer(process.kill)
        return process

    first, second = start("first"), start("second")
    deadline = time.monotonic() + 240
    while not {"first", "second"} <= listed().keys():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    second.kill()
    second.communicate()
    undisturbed, err = first.communicate(timeout=240)
    assert first.returncode == 0, err
    while listed()["second"]["state"] != "silent":
        assert time.monotonic() < deadline + 240
        time.sleep(1)
    runs = listed()
    assert (runs["first"]["state"], runs["first"]["step"]) == ("ended", 60)
    assert runs["first"]["host"] == os.uname().nodename
    assert runs["second"]["heard_seconds_ago"] > 60

    third = start("third")
    while "third" not in listed():
        time.sleep(0.5)
    durable_server.kill()
    out, err = third.communicate(timeout=240)
    assert third.returncode == 0, err
    losses = re.findall(r"^loss [\d.e-]+$", undisturbed, re.MULTILINE)
    assert len(losses) == 60
    assert re.findall(r"^loss [\d.e-]+$", out, re.MULTILINE) == losses
    assert "to be sent with `dsplan db push`" in out
    durable_server.start()
    assert listed()["third"]["state"] in ("running", "silent")
