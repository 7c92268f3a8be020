"""Phases beside the step's own: loading always, evaluation and saving where they are asked for."""

from __future__ import annotations

import re

import pytest

import dsplan
from tests.dsplan.cli import Cli

ESTIMATE = "estimate --model opt-125m --gpus 2 --gpu A100-SXM4-80GB --strategy fsdp --seq-len 512"


def phases(printed: str) -> list[str]:
    """The phases of the table, top to bottom."""
    table = printed.partition("allocated peak by phase")[2].partition("\n\n")[0]
    return re.findall(r"^(\w+) +[#.]{30}", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ("", []),
        ("--eval-batch 4", ["eval"]),
        ("--save sharded", ["save"]),
        ("--eval-batch 4 --save full", ["eval", "save"]),
    ],
)
def test_phases_stand_in_the_order_of_a_run(cli: Cli, flags: str, more: list[str]) -> None:
    expected = ["load", "forward", "loss", "backward", "step", *more]
    assert phases(cli(f"{ESTIMATE} {flags}").out) == expected
    assert list(cli(f"{ESTIMATE} {flags} --json").json["memory"]["phases"]) == expected


def test_a_table_says_when_a_phase_is(cli: Cli) -> None:
    out = cli(f"{ESTIMATE} --eval-batch 4").out
    assert re.search(r"^load .* once, while the model is placed$", out, re.MULTILINE)
    assert re.search(r"^eval .* every evaluation$", out, re.MULTILINE)


def test_kept_logits_count_for_the_peak(cli: Cli) -> None:
    few = cli(f"{ESTIMATE} --eval-batch 8 --json").json["memory"]
    many = cli(f"{ESTIMATE} --eval-batch 8 --eval-keep 50 --json").json["memory"]
    assert many["peak_phase"] == "eval"
    assert many["phases"]["backward"] == few["phases"]["backward"]
    # fp32 logits of 50 steps of both ranks.
    assert many["peak_allocated_bytes"] > 50 * 2 * 4 * 8 * 512 * 50272


def test_kept_logits_need_a_batch(cli: Cli) -> None:
    message = cli.refuses(f"{ESTIMATE} --eval-keep 4")
    assert message == (
        "dsplan: --eval-keep 4 keeps the logits of evaluation steps; give their samples per GPU with --eval-batch\n"
    )


def test_the_host_s_need_at_first_is_shown_where_it_is_larger(cli: Cli) -> None:
    printed = cli(f"{ESTIMATE} --json").json["memory"]
    assert printed["host_load_bytes_per_node"] > printed["host_bytes_per_node"]
    assert re.search(r"the host needs [\d.]+ \w+ per node \([\d.]+ \w+ at first\)", cli(ESTIMATE).out)


def test_scripts_ask_the_same() -> None:
    plan = dsplan.estimate(model="opt-125m", gpus=2, gpu="A100-SXM4-80GB", eval_batch=4, eval_keep=2, save="full")
    assert {"eval", "save"} <= plan.memory.phases.keys()
    assert (plan.workload["evaluation_batch_size"], plan.workload["evaluation_steps_kept"]) == (4, 2)
    assert plan.workload["save"] == "full"
