"""`dsplan simulate`, and what `recommend` says of failures: nothing of few GPUs, a line of many."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dsplan.render.failures_view import rate_text
from planner.cost.failures import Outlook
from tests.dsplan.cli import Cli

LARGE = "--model llama-3.1-8b --seq-len 4096 --global-batch 8192"
FEW = "--model opt-1.3b --gpus 4 --gpu A100-SXM4-80GB"


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text("gpu: H100-SXM5-80GB\nnodes: 256\nfailures_per_1000_node_days: 40\nrestart_minutes: 30\n")
    return f"--cluster {shlex.quote(str(path))}"


def test_recommend_has_failures_in_json_and_a_line_where_they_matter(cli: Cli, cluster: str) -> None:
    few, many = cli(f"recommend {FEW} --top 1"), cli(f"recommend {LARGE} {cluster} --tokens 1T --top 1")
    assert "failures:" not in few.out
    assert "one of 256 nodes fails every 2.34 h (40 per 1,000 node-days: the cluster file)" in many.out
    failures = cli(f"recommend {LARGE} {cluster} --tokens 1T --top 1 --json").json["plans"][0]
    left = failures["failures"]["goodput"]
    assert 0.7 < left < 0.85
    assert failures["failures"]["days"] == pytest.approx(failures["cost"]["days"] / left)
    assert f"{left:.1%}" in many.out


def test_a_device_without_published_failures_has_none(cli: Cli) -> None:
    assert cli("recommend --model gpt2 --gpus 2 --gpu RTX-4090 --json").json["plans"][0]["failures"] is None
    pytest.importorskip("simpy", reason="needs simpy (extra simulate)")
    assert "give --failures per 1,000 node-days" in cli.refuses("simulate --model gpt2 --gpus 2 --gpu RTX-4090")


def test_months_are_simulated_as_the_formula_says(cli: Cli, cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("simpy", reason="needs simpy (extra simulate)")
    pytest.importorskip("plotly", reason="needs plotly (extra report)")
    page = tmp_path / "months.html"
    answer = cli(f"simulate {LARGE} {cluster} --months 3 --days 6 --out {shlex.quote(str(page))} --json").json
    assert answer["goodput"] == pytest.approx(answer["goodput_by_formula"], abs=0.03)
    assert sum(answer["hours"].values()) == pytest.approx(6 * 24)
    assert answer["failures"] == pytest.approx(6 * 24 / 2.34, rel=0.2)
    gpus = [size["gpus"] for size in answer["sizes"]]
    assert gpus == [8, 64, 512, 2048, 4096, 16384, 100000]
    shares = [size["goodput_by_formula"] for size in answer["sizes"]]
    assert shares == sorted(shares, reverse=True)
    assert '"progress"' in page.read_text(encoding="utf-8")


def test_one_node_is_not_one_of_1_nodes() -> None:
    rates = {"per_1000_node_days": 2000.0, "least_per_1000_node_days": 1.0, "most_per_1000_node_days": 1.0}
    size = {"restart_seconds": 660.0, "checkpoint_bytes": 1.0, "save_seconds": 1.0, "step_seconds": 1.0}
    one = Outlook(nodes=1, said="a test", **rates, **size)
    assert rate_text(one) == "the node fails every 12 h (2,000 per 1,000 node-days: a test)"
    assert rate_text(replace(one, nodes=2)).startswith("one of 2 nodes fails every 6 h")


def test_nodes_that_never_fail_are_called_so(cli: Cli) -> None:
    pytest.importorskip("simpy", reason="needs simpy (extra simulate)")
    never = cli(f"simulate {FEW} --months 1 --days 1 --failures 0").out
    assert "no node fails" in never
    assert "nan" not in never
    assert "inf" not in never


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--spares 2", "--spares 2 needs --repair-hours"),
        ("--elastic", "--elastic needs --spares"),
        ("--stragglers 3", "--stragglers 3 needs --slowdown and --straggler-hours"),
        ("--preemptions 1", "--preemptions 1 needs --preempted-hours"),
    ],
)
def test_what_happens_needs_its_length(cli: Cli, flags: str, complaint: str) -> None:
    pytest.importorskip("simpy", reason="needs simpy (extra simulate)")
    assert complaint in cli.refuses(f"simulate {FEW} {flags}")
