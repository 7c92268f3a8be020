"""The import path that ranks inherit."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from strategies.launch.launchers import process
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.spec import LaunchSpec


@pytest.mark.parametrize(("home", "path"), [("purelib", "{own}"), ("checkout", "{root}{sep}{own}")])
def test_a_users_own_libraries_stay_before_installed_ones(
    home: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(sysconfig.get_path("purelib")).resolve() if home == "purelib" else tmp_path / "checkout"
    own = str(tmp_path / "fork-of-a-library")
    monkeypatch.setenv("PYTHONPATH", own)
    monkeypatch.setattr(process, "__file__", str(root / "strategies" / "launch" / "launchers" / "process.py"))
    spec = LaunchSpec(script="train.py", processes=1, run_directory=str(tmp_path), supervision=DEFAULT_SUPERVISION)
    assert process.launch_environment(spec)["PYTHONPATH"] == path.format(root=root, sep=os.pathsep, own=own)
