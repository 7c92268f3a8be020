"""Blocks as plain text and on terminals of any width and encoding."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

import dsplan
from dsplan.render.catalogues import devices_table, models_table, nodes_table
from dsplan.render.recommendation import plans_table, recommendation_blocks
from dsplan.render.show import Block, Text, plain_text, print_blocks, say, show
from dsplan.render.table_columns import Bar, Table, columns
from hardware_db.datasheets import devices, node_types
from hardware_db.notices import notice
from hardware_db.units import common_unit, format_seconds
from planner import vocabulary
from planner.models.catalogue import models
from planner.search.search import recommend
from tests.dsplan.cli import Cli
from tests.planner.search.questions import question

BLOCKS: list[Block] = [
    Text(text="opt-6.7b: 6.66B parameters", style="heading"),
    Table(
        title="memory",
        columns=columns("category", "share", ">size"),
        rows=[["parameters", Bar(share=0.5), "9.3 GiB"], ["über", Bar(share=1.7), "80.0 GiB"]],
    ),
]


def test_plain_text_is_aligned_ascii_apart_from_the_words() -> None:
    assert plain_text(BLOCKS) == (
        "opt-6.7b: 6.66B parameters\n"
        "\n"
        "memory\n"
        "category    share           size\n"
        "----------  ----------  --------\n"
        "parameters  #####.....   9.3 GiB\n"
        "über        ##########  80.0 GiB\n"
    )


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.04, 0.5, 1.0, 7.0])
def test_a_bar_never_leaves_its_width(share: float) -> None:
    assert 0 <= Bar(share=share).count_filled(10) <= 10


@pytest.mark.parametrize(
    ("bar", "state"),
    [
        (Bar(share=0.9), "below"),
        (Bar(share=0.95), "near"),
        (Bar(share=1.1), "over"),
        (Bar(share=1.0, of_limit=False), "below"),
    ],
)
def test_a_bar_warns_near_a_limit_alone(bar: Bar, state: str) -> None:
    assert bar.state == state


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", ["1", "20", "80", "300"])
def test_terminals_of_any_width_and_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, width: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace"))
    monkeypatch.setenv("COLUMNS", width)
    print_blocks(BLOCKS)
    sys.stdout.flush()
    drawn = raw.getvalue().decode(encoding)
    if int(width) >= 80:
        assert "9.3 GiB" in drawn
        assert ("█████░░░░░" if encoding == "utf-8" else "#####.....") in drawn


@pytest.mark.parametrize(("width", "left_out"), [(80, ["MFU"]), (40, ["MFU", "memory", "limit", "recompute"])])
def test_ranked_plans_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, left_out: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_blocks(recommendation_blocks(dsplan.recommend(model="llama-3-8b", gpus=16, gpu="H100-SXM5-80GB")))
    out = capsys.readouterr().out
    assert "fsdp-grad-op" in out
    assert "…" not in out
    assert all(len(line) <= width for line in out.splitlines())
    heading = next(line for line in out.splitlines() if line.startswith("#")).split()
    assert {"strategy", "GiB", "step"} <= set(heading)
    assert not set(left_out) & set(heading)


@pytest.mark.parametrize("width", ["80", "40"])
@pytest.mark.parametrize("blocks", [models_table(models()), devices_table(devices()), nodes_table(node_types())])
def test_a_narrow_terminal_leaves_columns_out_rather_than_cut_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], blocks: list[Block], width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    print_blocks(blocks)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "a wider terminal also shows" in out


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("models DeepSeek-R1", {"model", "parameters"}),
        ("devices H100", {"device", "memory", "GB/s"}),
        ("devices --links nvlink4", {"link", "peak"}),
        ("devices --nodes p4d", {"node", "type", "GPUs"}),
        ("max --model mistral-7b --gpus 4 --gpu A100-SXM4-40GB --strategy fsdp", {"micro-batch", "sequence", "model"}),
        ("estimate --model opt-6.7b --gpu A100-SXM4-80GB --gpus 8 --strategy fsdp", {"category", "share", "size"}),
    ],
)
def test_tables_keep_their_answer_at_any_width(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, answers: set[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("dsplan.render.show.show", print_blocks)
    monkeypatch.setattr("dsplan.render.catalogues.show", print_blocks)
    out = cli(line).out
    assert "…" not in out
    assert all(len(row) <= width for row in out.splitlines())
    headings = [set(before.split()) for before, rule in pairwise(out.splitlines()) if set(rule) == {"─"}]
    assert answers <= headings[0]
    bars = [row for row in out.splitlines() if "░" in row]
    assert all(any(letter.isdigit() for letter in row) for row in bars)  # beside its figure, none on a line of its own


class AsciiTerminal(io.StringIO):
    """A terminal whose encoding has no letters but ASCII's, with what is printed to it."""

    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_words_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", shown := AsciiTerminal())
    name, path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "/a/path/that/is/wider/than/the/terminal"
    show([Table(columns=columns("model", ">layers"), rows=[[name, "28"]])])
    say(f"  - loads the model with dtype=torch.float32\n{path}")
    notice("the disk is full; free space there", stream="stdout")
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == [
        "model                   layers",
        "-" * 30,
        "deepseek-ai/DeepSeek-       28",
        "R1-Distill-Qwen-1.5B",
        "  - loads the model with",
        "  dtype=torch.float32",
        path,
        "dsplan: the disk is full; free",
        "space there",
    ]


def test_letters_that_take_two_columns_are_counted_so() -> None:
    table = Table(columns=columns("script", ">steps"), rows=[["训练.py", "1"], ["train.py", "20"]])
    assert plain_text([table]).splitlines()[2:] == ["训练.py       1", "train.py     20"]


def test_throughput_over_gpus_is_drawn_beside_linear_growth(cli: Cli) -> None:
    line = "recommend --model opt-1.3b --gpus 2 --gpu A100-SXM4-80GB --global-batch 64 --plot"
    points = cli(f"{line} --json").json["scaling"]
    assert [point["gpus"] for point in points] == [1, 2, 4, 8]
    alone = points[0]["tokens_per_second"]
    assert alone == pytest.approx(64 * 2048 / points[0]["step_seconds"])
    for point in points:
        assert point["of_linear"] == pytest.approx(point["tokens_per_second"] / (alone * point["gpus"]))
    drawn = cli(line).out.split("throughput over GPUs")[1].splitlines()
    lengths = [row.count("#") for row in drawn if "#" in row]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 30
    assert "nothing to plot" in cli("recommend --model llama-2-70b --gpus 1 --gpu RTX-4090 --plot").out


@pytest.mark.parametrize("objective", get_args(vocabulary.Objective))
@pytest.mark.sweep(every=3)
def test_why_the_first_plan_is_first_is_one_line(objective: vocabulary.Objective) -> None:
    answer = dsplan.recommend(model="opt-6.7b", gpus=8, gpu="A100-SXM4-80GB", objective=objective)
    (line,) = [line for line in plain_text(recommendation_blocks(answer)).splitlines() if line.startswith("first: ")]
    assert line == f"first: {answer.choice}"
    assert answer.choice.startswith(answer.plans[0].configuration.strategy)


def test_a_faster_plan_that_is_not_shown_says_why() -> None:
    answer = dsplan.recommend(model="gpt2", gpus=8, gpu="A100-SXM4-80GB", top=1)
    first = answer.plans[0].time.step_seconds
    faster = [item for item in answer.rejected if item.plan and item.plan.time.step_seconds < 0.99 * first]
    assert faster
    assert all("which is simpler" in item.reason for item in faster if item.plan and item.plan.runnable)
    slower = [item for item in answer.rejected if item.plan and item.plan.time.step_seconds > first]
    assert not any("simpler" in item.reason for item in slower)


def test_steps_of_one_table_have_one_unit_with_their_intervals() -> None:
    request = question("gpt2", "a100-80gb", 1)
    plan = recommend(request).plans[0]
    times = [replace(plan.time, step_seconds=each, step_seconds_low=0.75 * each) for each in (119.9, 119.6, 341.0)]
    table = plans_table(request, [replace(plan, time=time) for time in times])
    names = [column.name for column in table.columns]
    assert [row[names.index("step")] for row in table.rows] == ["120 s", "120 s", "341 s"]
    assert all(str(row[names.index("9 of 10")]).startswith(("89.", "256")) for row in table.rows)


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((0.9, 1.2), ["0.9 s", "1.2 s"]),
        ((50.0, 300.0), ["50 s", "300 s"]),
        ((0.054, 13.4), ["54 ms", "13.4 s"]),
        ((1500.0, 9000.0), ["25 min", "150 min"]),
    ],
)
def test_a_column_of_times_has_one_unit_unless_they_differ_too_much(
    seconds: tuple[float, ...], texts: list[str]
) -> None:
    unit = common_unit(seconds)
    assert [format_seconds(each, unit) for each in seconds] == texts
