"""A metrics file that cannot be written ends no training."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies.telemetry.metrics import MetricsFile


def test_a_file_that_takes_no_more_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "metrics-rank0.jsonl").symlink_to("/dev/full")
    file = MetricsFile(tmp_path, 0)
    for step in range(5):
        file.write({"event": "step", "step": step})
    file.close()
    file.write({"event": "step", "step": 5})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("takes no more rows (No space left on device)")
