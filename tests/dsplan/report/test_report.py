"""`dsplan report`: what its pictures show is what the JSON says, and the file asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsplan.__main__ import main
from dsplan.question import Question
from dsplan.report.plans import trade
from dsplan.report.question import _log_axis, answer_pictures
from planner.search.scaling import over_devices, over_lengths, over_micro_batches
from planner.search.search import recommend
from tests.dsplan.cli import Cli

pytest.importorskip("plotly", reason="needs plotly (extra report)")

ASKED = "--model facebook/opt-1.3b --gpus 4 --gpu A100-SXM4-80GB"
HOSTILE = "<script>alert(1)</script>\x1b[31m&\"'"


def figures(page: str) -> dict[str, Any]:
    """Return what plotly draws on a page, by picture."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return dict(json.loads(data[1])["figures"])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a question."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    assert main(["report", *ASKED.split(), "--out", str(path)]) == 0
    return path


def test_the_numbers_of_the_pictures_are_those_of_the_json(cli: Cli, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    drawn = figures(text)
    answer = cli(f"recommend {ASKED} --pareto --json").json
    plans, first = answer["plans"], answer["plans"][0]
    used = [sum(bar["x"][index] for bar in drawn["memory"]["data"]) for index in range(len(plans))]
    assert used == pytest.approx([plan["memory"]["device_used_bytes"] / 2**30 for plan in plans], rel=0.01)
    assert drawn["phases"]["data"][0]["x"] == pytest.approx(
        [size / 2**30 for size in first["memory"]["phases"].values()]
    )
    steps = drawn["seconds"]["data"][-1]["x"]
    assert steps == [plan["time"]["step_seconds"] for plan in plans]
    ends = [
        base + length for bar in drawn["timeline"]["data"] for base, length in zip(bar["base"], bar["x"], strict=True)
    ]
    assert max(ends) == pytest.approx(first["time"]["step_seconds"])
    exposed = next(bar for bar in drawn["timeline"]["data"] if bar["y"] and bar["y"][0] == "exposed")
    assert sum(exposed["x"]) == pytest.approx(first["time"]["exposed_communication_seconds"])
    assert sum(len(group["x"]) for group in drawn["pareto"]["data"]) == len(answer["front"])
    for rejected in answer["rejected"]:
        assert rejected["strategy"] in text


def test_the_file_asks_for_nothing_and_runs_nothing_but_its_own_scripts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1]
    for script in scripts:
        text = text.replace(script, "")
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text)
    assert not re.findall(r"\son[a-z]+=", text)


@pytest.mark.slow
def test_a_hostile_name_is_text(cli: Cli, tmp_path: Path, page: Path) -> None:
    assert cli(f"recommend {ASKED} --out", tmp_path / "plans").status == 0
    plan = tmp_path / "plans" / "plan-1.yaml"
    document = json.loads(cli("explain", plan, "--json").out)
    for name in (HOSTILE, HOSTILE + "A" * 2**20):
        document["model"]["name"] = name
        document["cluster"]["device"] = name
        plan.write_text(json.dumps(document))
        assert cli("report", plan, "--out", tmp_path / "hostile.html").status == 0
        text = (tmp_path / "hostile.html").read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "\x1b" not in text
        assert "&lt;script&gt;alert(1)" in text
        assert len(text) < page.stat().st_size + 2**17


def test_one_line_says_what_cannot_be_reported(cli: Cli, tmp_path: Path) -> None:
    out = f"--out '{tmp_path}/page.html'"
    assert "holds neither a plan nor a run" in cli.refuses(f"report {out}", tmp_path)
    assert "cannot be read" in cli.refuses(f"report {out}", tmp_path / "none.yaml")
    assert "--gpus ask a question of their own" in cli.refuses(f"report --gpus 4 {out}", tmp_path)
    assert "--out is missing" in cli.refuses(f"report {ASKED}")
    assert "cannot be written" in cli.refuses(f"report {ASKED} --out", tmp_path / "none" / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_does_not_fit_is_a_page_with_the_closest_miss(cli: Cli, tmp_path: Path) -> None:
    printed = cli("report --model llama-3-70b --gpus 1 --gpu V100-SXM2-16GB --json --out", tmp_path / "page.html")
    assert printed.status == 1
    assert printed.json["pictures"] == ["memory", "phases", "seconds"]
    assert printed.json["bytes"] == (tmp_path / "page.html").stat().st_size
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "No plan fits" in text
    # The reason is beside the bars too: they are below the limit where it is the host whose memory does not do.
    assert len(re.findall("The verdict: does not fit: needs", text)) == 1


def test_one_gpu_has_no_words_about_communication() -> None:
    request = Question(model="openai-community/gpt2", gpus=1, gpu="RTX-4090").request()
    pictures = {picture.name: picture for picture in answer_pictures(recommend(request, with_front=True))}
    assert "communication" not in pictures["seconds"].legend
    assert "Communication" not in pictures["seconds"].caption
    assert pictures["timeline"].title == "The step of plan 1 on one stream: single"
    assert pictures["timeline"].caption.endswith("nothing is communicated.")
    # A single bar leaves plotly room for the words of its axis.
    layout = pictures["timeline"].figure["layout"]
    assert layout["height"] - layout["margin"]["t"] - layout["margin"]["b"] >= 64


def test_numbers_of_plans_in_one_place_are_one_label() -> None:
    plan = recommend(Question(model="facebook/opt-125m", gpus=1, gpu="RTX-4090").request()).plans[0]
    slower = replace(plan, time=replace(plan.time, step_seconds=2 * plan.time.step_seconds))
    assert trade([plan, slower, plan])["data"][0]["text"] == ["1, 3", "2", ""]


@pytest.mark.parametrize("values", [(0.0057, 0.0167), (2.1, 9.0), (0.95, 1.05), (12.0, 900.0), (3.0, 40000.0)])
def test_an_axis_has_two_marks_or_more_between_its_ends(values: tuple[float, float]) -> None:
    axis, (low, high) = _log_axis(values), values
    decades = [10.0**power for power in range(-3, 6)]
    marks = axis.get("tickvals") or [
        step * decade for decade in decades for step in ((1, 2, 5) if axis.get("dtick") == "D2" else (1,))
    ]
    assert ("type" in axis) == (high >= 2 * low)  # plotly chooses the marks where it is linear
    assert "type" not in axis or sum(low <= mark <= high for mark in marks) >= 2


def test_scaling_keeps_what_it_does_not_vary() -> None:
    request = Question(model="facebook/opt-1.3b", gpus=4, gpu="A100-SXM4-80GB").request()
    first = recommend(request).plans[0]
    devices = over_devices(request, first)
    assert [plan.configuration.world_size for plan in devices] == [1, 2, 4, 8, 16]
    assert first in devices
    micro = over_micro_batches(request, first)
    assert first.configuration in [plan.configuration for plan in micro]
    assert {plan.configuration.global_batch_size for plan in micro} == {first.configuration.global_batch_size}
    used = [plan.memory.device_used_bytes for plan in micro]
    assert used == sorted(used)
    lengths = [plan.configuration.sequence_length for plan in over_lengths(request, first)]
    assert lengths == [512, 1024, 2048]  # as far as OPT's positions go
