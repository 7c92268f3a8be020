"""Prices, deadlines and the front at the command line: what the tables show and what the JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardware_db.datasheets import find_node_type, node_types, sources
from hardware_db.units import format_seconds
from tests.dsplan.cli import Cli

ASKED = "recommend --model opt-1.3b --gpus 8 --gpu A100-SXM4-80GB --global-batch 64"


def test_a_price_gives_dollars_per_million_tokens_and_of_the_whole_training(cli: Cli) -> None:
    answer = json.loads(cli(f"{ASKED} --price 2.5 --tokens 100B --json").out)
    for plan in answer["plans"]:
        cost, chosen = plan["cost"], plan["plan"]
        per_step = chosen["global_batch_size"] * chosen["sequence_length"]
        seconds = plan["time"]["step_seconds"] * 1e6 / per_step
        assert cost["usd_per_million_tokens"] == pytest.approx(seconds * 8 / 3600 * 2.5)
        assert cost["days"] == pytest.approx(seconds * 1e5 / 86_400)
        assert cost["usd"] == pytest.approx(cost["days"] * 24 * 8 * 2.5)


def test_without_a_price_cost_is_gpu_hours_and_says_so(cli: Cli) -> None:
    shown = cli(f"{ASKED} --objective cost").out
    assert "GPU-h/Mtoken" in shown
    assert "no price is known" in shown
    assert "$" not in shown


def test_a_named_node_type_brings_its_list_price_with_its_date(cli: Cli) -> None:
    command = "recommend --model opt-1.3b --node-type p5 --objective cost"
    node = find_node_type("p5")
    assert node.usd_per_hour is not None
    assert (
        f"at ${node.usd_per_hour / 8:.3g} per GPU-hour, list price of {node.name} on {node.priced_on}"
        in cli(command).out
    )
    assert "at $1 per GPU-hour" in cli(f"{command} --price 1").out


def test_a_gpu_named_alone_has_no_price(cli: Cli) -> None:
    assert "$" not in cli("recommend --model opt-1.3b --gpus 1 --gpu A100-PCIE-80GB --objective cost").out


def test_every_price_has_a_date_and_a_source() -> None:
    priced = [node for node in node_types() if node.usd_per_hour is not None]
    assert priced
    for node in priced:
        assert node.priced_on
        assert [sources()[key] for key in node.source["price"]]


def test_a_cluster_file_may_hold_the_price(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: A100-SXM4-80GB\ngpus_per_node: 8\nusd_per_gpu_hour: 1.25\n")
    command = "recommend --model opt-1.3b --objective cost --cluster"
    assert "at $1.25 per GPU-hour, from the cluster file" in cli(command, file).out
    file.write_text("gpu: A100-SXM4-80GB\nusd_per_gpu_hour: free\n")
    assert "write a number from 0.0001 to 1,000,000 dollars" in cli.refuses(command, file)


def test_a_deadline_that_cannot_be_met_ends_with_status_1_and_says_what_would_do(cli: Cli) -> None:
    finished = cli(f"{ASKED} --global-batch 512 --tokens 300B --deadline 10d")
    assert finished.status == 1
    assert "no plan that fits ends in 10 days" in finished.out
    assert "in time is 10 days" in finished.out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (20 * 86400, "20 days"),
        (86400, "1 day"),
        (3 * 3600 + 720, "3.2 h"),
        (1370, "22.8 min"),
        (90, "90 s"),
        (45, "45 s"),
        (0.9999, "1 s"),
        (0.15, "150 ms"),
        (12e-6, "12 us"),
        (0, "0 s"),
        (-0.5, "-500 ms"),
        (2_000 * 86400, "2000 days"),
    ],
)
def test_durations_are_printed_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_front_is_a_table_and_a_list(cli: Cli) -> None:
    assert "no plan beats one of these in step time, memory and number of GPUs" in cli(f"{ASKED} --pareto").out
    answer = json.loads(cli(f"{ASKED} --pareto --json").out)
    gpus = [plan["cluster"]["gpus"] for plan in answer["front"]]
    assert gpus == sorted(gpus, reverse=True)
    assert set(gpus) == {8, 4, 2, 1}
    assert json.loads(cli(f"{ASKED} --json").out)["front"] == []


@pytest.mark.parametrize("price", ["0", "-1", "inf", "nan", "1e308"])
def test_what_is_no_price_is_refused_in_one_line(price: str, cli: Cli) -> None:
    answer = cli(f"recommend --model opt-1.3b --gpus 4 --gpu A100-80 --price {price}")
    assert answer.status == 2
    assert "; give a number from 0.0001 to 1,000,000" in answer.err
