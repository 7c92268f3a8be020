"""First plans are such as an expert would take: the questions of public recipes, a few of them by default."""

from __future__ import annotations

import pytest

from scripts.report.first_plans import ask, rows

ROWS = {row.id: row for row in rows()}
QUICK = (
    "bert-large-64-rtx4090",
    "bert-large-squad-8-v100",
    "size-0.3b-8-a100",
    "torchtune-8b-lora-4090",
    "zephyr-7b-8",
    "llm-foundry-mpt-30b-8",
    "axolotl-gpt-oss-20b-lora-48",
    "torchtitan-8b-128-h100",
    "megatron-70b-64-h100",
    "nemo-mixtral-8x7b-64",
)
"""One of each kind of mistake that was made before: pipelines and shards of small models, offload, eager attention."""
HELD_OUT = {row.id: row for row in rows("held_out")}


def test_there_are_sixty_of_ten_projects() -> None:
    assert len(ROWS) == 60
    assert len(HELD_OUT) == 30
    assert not ROWS.keys() & HELD_OUT.keys()
    assert len({row.source.partition("@")[0].partition(" ")[0] for row in ROWS.values()}) >= 10


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.sweep(every=2)
def test_a_first_plan_meets_what_is_insisted_on(name: str) -> None:
    answer = ask(ROWS[name])
    assert not answer.misses, answer.first


def test_a_batch_that_only_three_stages_divide_has_a_plan() -> None:
    """BLOOM's own 384 GPUs and 2,048 samples."""
    answer = ask(HELD_OUT["bloom-384"])
    assert not answer.misses, answer.first


@pytest.mark.slow
def test_fifty_eight_of_sixty_are_met_and_twenty_seven_of_those_held_out() -> None:
    for questions, most in ((ROWS, 2), (HELD_OUT, 3)):
        missed = {row.id: answer.misses for row in questions.values() if (answer := ask(row)).misses}
        assert len(missed) <= most, missed
