"""Damaged databases: said in one line, set aside, and rebuilt with the rows that SQLite can still read."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.fingerprint import MachineIdentity
from hardware_db.store import open_store, repair
from tests.hardware_db.store.records import A100, FROZEN, FROZEN_RATE, FROZEN_RUN, calibration, measurement, rate, trace

RUNS = tuple(measurement(number) for number in range(1, 50))
RATES = tuple(rate(number, id=f"{1000 + number:032x}") for number in range(1, 50))
ANOTHER_RATE = replace(FROZEN_RATE, id="f" * 32)
TRACE = replace(trace(1), key="e" * 32)
CALIBRATION = replace(calibration(1), id="d" * 32)
SCHEMAS = Path(__file__).parent / "schemas"
PAGE = 4096
TABLE_LEAF = 13
RUN_PLAN = b'"strategy"'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with many records, closed."""
    path = tmp_path / "dsplan.db"
    with open_store(path) as store:
        store.add(*(record for pair in zip(RUNS, RATES, strict=True) for record in pair), ANOTHER_RATE)
        store.add_trace(TRACE)
        store.add_calibration(CALIBRATION)
    return path


def _damage(path: Path, start: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[start : start + len(content)] = content
    path.write_bytes(bytes(whole))


def _header(path: Path) -> None:
    _damage(path, 0, random.Random(1).randbytes(100))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])


def _cut_within_a_page(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 26 * PAGE + 1000])


def _third_of_all_pages(path: Path) -> None:
    for number in range(2, path.stat().st_size // PAGE, 3):
        _damage(path, number * PAGE, b"\xff" * PAGE)


def _noise(path: Path) -> None:
    chance = random.Random(3)
    for _ in range(40):
        _damage(path, chance.randrange(PAGE, path.stat().st_size), chance.randbytes(8))


def _schema_is_no_text(path: Path) -> None:
    _damage(path, path.read_bytes().index(b"CREATE TABLE measurements"), b"\xfa\xfb")


def _other_format(path: Path) -> None:
    _damage(path, 44, b"\x09\x09\x09\x09")


def _without_an_index(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("DELETE FROM sqlite_master WHERE name = 'measurements_by_time'")
    connection.close()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "cut within a page": _cut_within_a_page,
    "third of all pages": _third_of_all_pages,
    "noise": _noise,
}
HOPELESS: dict[str, Callable[[Path], None]] = {"other format": _other_format, "header": _header}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_rebuilt_from_what_can_be_read(
    path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](path)
    damaged = path.read_bytes()
    with open_store(path) as store:
        runs, rates = store.list(), store.rates()
        assert store.add(measurement(58)) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"dsplan: {path} was damaged: ")
    aside = next(path.parent.glob("dsplan.db.damaged-*"))
    assert aside.name in told[0]
    assert aside.read_bytes() == damaged
    assert runs
    assert rates
    # A flipped letter inside a text passes for the text; nothing else is invented.
    if damage != "noise":
        assert set(runs) <= set(RUNS)
        assert set(rates) <= {*RATES, ANOTHER_RATE}
    with open_store(path) as store:
        assert store.count() == len(runs) + 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", HOPELESS)
@pytest.mark.sweep(every=2)
def test_a_database_that_cannot_be_opened_is_set_aside_whole_and_says_how_runs_come_back(
    path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    HOPELESS[damage](path)
    damaged = path.read_bytes()
    with open_store(path) as store:
        assert store.count() == 0
        assert store.add(measurement(58)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    (aside,) = path.parent.glob("dsplan.db.damaged-*")
    assert aside.read_bytes() == damaged
    assert line == (
        f"dsplan: {path} was damaged: nothing read and kept; the damaged file is {aside.name} beside it;"
        " `dsplan db import RUN_DIRECTORY` brings back a run that is missing"
    )


def test_a_table_whose_definition_is_no_text_costs_no_other_table(path: Path) -> None:
    _schema_is_no_text(path)
    with open_store(path) as store:
        assert store.list() == ()
        assert set(store.rates()) == {*RATES, ANOTHER_RATE}
        assert store.trace(TRACE.key) == TRACE


def test_whichever_leaf_is_lost_the_rows_of_all_others_are_kept(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    everything = {run.id for run in RUNS}
    pages = {number: whole[number * PAGE : (number + 1) * PAGE] for number in range(1, len(whole) // PAGE)}
    leaves = [number for number, page in pages.items() if page[0] == TABLE_LEAF and RUN_PLAN in page]
    assert len(leaves) > 3
    for number in leaves:
        damaged = tmp_path / f"page-{number}.db"
        damaged.write_bytes(whole)
        _damage(damaged, number * PAGE, b"\xff" * PAGE)
        with open_store(damaged) as store:
            kept = {run.id for run in store.list()}
        assert kept < everything
        assert len(everything - kept) <= PAGE // 500  # what one page can hold


def test_runs_whose_machine_is_lost_are_kept_and_know_it_again_after_the_next_run(path: Path) -> None:
    connection = sqlite3.connect(path)
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'fingerprints'").fetchone()[0]
    connection.close()
    _damage(path, (root - 1) * PAGE, b"\xff" * PAGE)
    with open_store(path) as store:
        assert [row.id for row in store.list(fingerprint=A100.key)] == [row.id for row in reversed(RUNS)]
        assert store.list()[0].fingerprint.machine == MachineIdentity()
        assert len(store.rates()) == len(RATES) + 1
        store.add(measurement(58))
        assert set(store.list()) == {*RUNS, measurement(58)}


def test_one_broken_record_costs_no_other(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE measurements SET plan = replace(plan, '{', '[') WHERE id = ?", (RUNS[7].id,))
    connection.commit()
    connection.close()
    with open_store(path) as store:
        assert set(store.list()) == set(RUNS) - {RUNS[7]}
        assert len(store.rates()) == len(RATES) + 1
        assert store.trace(TRACE.key) == TRACE
        assert store.calibrations() == (CALIBRATION,)
    assert "48 measurements, 50 rates, 1 traces, 1 calibrations read and kept" in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_damaged_database_of_every_schema_is_rebuilt(tmp_path: Path, number: int) -> None:
    path = Path(shutil.copy(SCHEMAS / f"schema-{number}.db", tmp_path / "dsplan.db"))
    _without_an_index(path)
    with open_store(path, thorough=True) as store:
        assert set(store.list()) == {FROZEN[0], FROZEN[1], *([FROZEN_RUN] if number > 2 else [])}
        assert set(store.rates()) == {FROZEN[2], *([FROZEN_RATE] if number > 2 else [])}


def test_what_only_the_log_holds_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "dsplan.db"
    body = Path(__file__).with_name("processes.py")
    killed = subprocess.run([sys.executable, str(body), "die_after_adding", str(path), "5"], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert path.with_name("dsplan.db-wal").stat().st_size > 0
    path.write_bytes(b"\x00" * max(path.stat().st_size, PAGE))
    with open_store(path) as store:
        assert store.count() == 5


def test_nothing_but_zeros_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dsplan.db"
    path.write_bytes(b"\x00" * 3 * PAGE)
    with open_store(path) as store:
        assert store.count() == 0
    assert "nothing read and kept" in capsys.readouterr().err


def test_a_repair_that_was_killed_stops_no_later_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "_LOCK_SECONDS", -1.0)  # no patience: whatever is to be waited for is refused
    path.with_name(".dsplan.db.repair").touch()
    path.with_name(".dsplan.db.rebuilt").write_bytes(path.read_bytes()[:PAGE])
    path.with_name(".dsplan.db.rebuilt-journal").write_bytes(b"\x00" * PAGE)
    _cut(path)
    with open_store(path) as store:
        assert store.count() > 0
    assert sorted(file.name for file in path.parent.iterdir() if file.name.startswith(".")) == []


@pytest.mark.parametrize("failing", ["link", "replace"])
def test_a_full_disk_leaves_the_damaged_file_as_it_was(
    path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cut(path)
    damaged = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(BrokenFile, match=r"cannot be set aside \(No space left on device\); copy it to a directory"):
        open_store(path)
    assert path.read_bytes() == damaged
    assert not [file for file in path.parent.iterdir() if file.name.startswith(".")]


def test_long_records_that_span_pages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "dsplan.db"
    long = measurement(1, source="shipped:" + "a long remark " * 2000)
    with open_store(path) as store:
        store.add(long)
    _without_an_index(path)
    with open_store(path) as store:
        assert store.list() == (long,)
