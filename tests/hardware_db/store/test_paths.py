"""The place of the database, and the replacement of files."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.files import (
    data_dir,
    database_path,
    provide_torch_extensions,
    replace_text,
    replace_whole,
    replacement,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DSPLAN_HOME", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")


def test_dsplan_home_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("DSPLAN_HOME", "~/records")
    assert data_dir() == tmp_path / "records"
    assert database_path() == tmp_path / "records" / "dsplan.db"


def test_xdg_data_home_counts_when_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_dir() == Path("/data/dsplan")
    for ignored in ("data", ""):
        monkeypatch.setenv("XDG_DATA_HOME", ignored)
        assert data_dir() == tmp_path / ".local" / "share" / "dsplan"


def test_other_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_dir() == tmp_path / "Library" / "Application Support" / "dsplan"
    monkeypatch.setattr(sys, "platform", "win32")
    assert data_dir() == tmp_path / "AppData" / "Local" / "dsplan"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert data_dir() == tmp_path / "local" / "dsplan"


def test_an_empty_dsplan_home_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPLAN_HOME", "")
    assert data_dir() == tmp_path / ".local" / "share" / "dsplan"


def test_a_user_without_a_home_keeps_it_under_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers do that run as a user id of which no system file knows."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
    assert data_dir() == Path("/.local/share/dsplan")
    monkeypatch.setenv("DSPLAN_HOME", "~nobody-of-that-name/records")
    assert data_dir() == Path("~nobody-of-that-name/records")


def test_operators_are_compiled_where_the_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    provide_torch_extensions(variables)
    assert "TORCH_EXTENSIONS_DIR" not in variables, "the usual place will do"
    (tmp_path / "file").write_text("")
    places = []
    for _ in range(2):
        refused = {"XDG_CACHE_HOME": str(tmp_path / "file")}
        provide_torch_extensions(refused)
        places.append(Path(refused["TORCH_EXTENSIONS_DIR"]))
    assert places[0] == places[1], "what one run compiled serves the next"
    assert places[0].parent == tmp_path / "temporary"
    assert stat.S_IMODE(places[0].stat().st_mode) == 0o700
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TORCH_EXTENSIONS_DIR": "/asked"}
    provide_torch_extensions(environment)
    assert environment["TORCH_EXTENSIONS_DIR"] == "/asked"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    replace_text(target, "néw\n")
    assert target.read_bytes() == "néw\n".encode()
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_new_file_gets_the_mode_that_open_would_give(tmp_path: Path) -> None:
    (tmp_path / "reference").touch()
    replace_text(tmp_path / "out", "x")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("reference", "out")]
    assert modes[0] == modes[1]


def test_a_symbolic_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x"


@pytest.mark.parametrize(
    ("path", "problem"),
    [("missing/out", "cannot be written"), (".", "not a regular file"), ("/dev/null", "not a regular file")],
)
def test_what_cannot_be_replaced(tmp_path: Path, path: str, problem: str) -> None:
    with pytest.raises(BrokenFile, match=problem):
        replace_text(tmp_path / path, "x")


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BrokenFile, match=r"out: cannot be written \(No space left on device\)"):
        replace_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_of_its_own_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "orders.json"
    replace_whole(path, "old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_beside_a_file_takes_its_place_only_where_all_went_well(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with replacement(path, durable=True) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()

    def fail_half_way() -> None:
        with replacement(path) as temporary:
            temporary.write_bytes(b"half")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail_half_way()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_replacement_waits_for_the_bytes_and_then_for_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    replace_whole(tmp_path / "quick", "a")
    assert synced == []
    replace_whole(tmp_path / "latest", "a", durable=True)
    file, folder = synced
    assert Path(file).name.startswith(".latest.")
    assert folder == str(tmp_path)
