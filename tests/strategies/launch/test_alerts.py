"""Alerts of a run's ranks reach the journal and the terminal of `dsplan run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.strategies.launch.command import run

SCRIPT = """
import time
import torch
import dsplan

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return ((self.line(x) - y) ** 2).mean()

torch.manual_seed(0)
data = [(torch.randn(8), torch.zeros(1)) for _ in range(8 * 90)]
config = {"train_batch_size": 8, "monitor": {"thresholds": {"rss_bytes": {"above": 1}}}}
engine, _, loader, _ = dsplan.initialize(model=Model(), training_data=data, config=config, strategy="ddp")
for x, y in loader:
    if engine.environment.rank == 1:
        time.sleep(0.03)
    loss = engine(x, y)
    engine.backward(loss * float("nan") if engine.global_steps == 30 else loss)
    engine.step()
"""


@pytest.mark.slow
def test_alerts_are_in_the_journal_and_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    finished = run("--nproc", "2", "--run-dir", "here", "train.py", cwd=tmp_path)
    assert finished.status == 0, finished.err
    rows = [json.loads(line) for line in (tmp_path / "here" / "run.jsonl").read_text().splitlines()]
    alerts = {row["kind"]: row for row in rows if row["event"] == "alert"}
    assert set(alerts) == {"threshold", "not_finite", "straggler"}
    assert (alerts["threshold"]["step"], alerts["threshold"]["metric"]) == (1, "rss_bytes")
    assert alerts["not_finite"]["step"] == 31
    assert (alerts["straggler"]["rank"], alerts["straggler"]["metric"]) == (1, "load_seconds")
    shown = finished.out + finished.err
    assert all(row["message"] in shown for row in alerts.values())
