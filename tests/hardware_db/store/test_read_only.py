"""A database where nothing can be written is read as it is, and left as it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.store import open_store
from hardware_db.store.connection import is_read_only
from tests.hardware_db.store.records import FROZEN, measurement

SCHEMAS = Path(__file__).parent / "schemas"
PROCESSES = Path(__file__).with_name("processes.py")


def _filled(path: Path) -> None:
    with open_store(path) as store:
        store.add(*(measurement(number) for number in range(1, 6)))


def _with_log(path: Path) -> None:
    killed = subprocess.run([sys.executable, str(PROCESSES), "die_after_adding", str(path), "5"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Path(f"{path}-wal").stat().st_size > 0


def _with_log_alone(path: Path) -> None:
    _with_log(path)
    Path(f"{path}-shm").unlink()


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Takes away the right to write in a directory: by a read-only mount for root, whom permissions do not stop."""
    undo: list[Callable[[], object]] = []

    def freeze(directory: Path) -> None:
        if os.geteuid() == 0:
            _mount_read_only(directory)
            undo.append(lambda: subprocess.run(["umount", str(directory)], check=True))
        else:
            directory.chmod(0o500)
            undo.append(lambda: directory.chmod(0o700))

    yield freeze
    for step in undo:
        step()


def _mount_read_only(directory: Path) -> None:
    for options in (["--bind", str(directory), str(directory)], ["-o", "remount,ro,bind", str(directory)]):
        finished = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if finished.returncode:
            pytest.skip(f"root may not mount here: {finished.stderr.strip()}")


@pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does")
@pytest.mark.parametrize("make", [_filled, _with_log, _with_log_alone])
def test_a_database_on_a_read_only_disk_is_read(
    tmp_path: Path, frozen_disk: Callable[[Path], None], make: Callable[[Path], None]
) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    make(path)
    before = sorted(os.listdir(path.parent))
    frozen_disk(path.parent)
    assert is_read_only(path)
    with open_store(path, thorough=True) as store:
        assert store.count() == 5
        assert len(store.list()) == 5
        with pytest.raises(BrokenFile, match=r"dsplan\.db: the database is read-only; set DSPLAN_HOME"):
            store.add(measurement(9))
    assert sorted(os.listdir(path.parent)) == before


@pytest.fixture
def said_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file looks as on a read-only disk, on any machine and for any user."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)


@pytest.mark.usefixtures("said_read_only")
@pytest.mark.parametrize("log", [False, True])
def test_without_the_right_to_write_nothing_is_written(tmp_path: Path, log: bool) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    (_with_log_alone if log else _filled)(path)
    before = path.read_bytes()
    with open_store(path) as store:
        assert store.count() == 5
        with pytest.raises(BrokenFile, match="read-only"):
            store.add(measurement(9))
    assert path.read_bytes() == before


@pytest.mark.usefixtures("said_read_only")
def test_an_older_schema_is_upgraded_in_memory(tmp_path: Path) -> None:
    path = Path(shutil.copy(SCHEMAS / "schema-1.db", tmp_path / "dsplan.db"))
    before = path.read_bytes()
    with open_store(path) as store:
        assert store.list() == (FROZEN[1], FROZEN[0])
        assert store.calibrations() == ()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["dsplan.db"]


@pytest.mark.usefixtures("said_read_only")
def test_a_damaged_database_that_cannot_be_set_aside_is_one_line(tmp_path: Path) -> None:
    path = Path(shutil.copy(SCHEMAS / "schema-1.db", tmp_path / "dsplan.db"))
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(BrokenFile, match="is damaged, and cannot be set aside on a read-only disk; copy it"):
        open_store(path)
    assert os.listdir(tmp_path) == ["dsplan.db"]
