"""The snippets of docs/how-to/migration.md: before and after reach the same losses on two ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.migration_bodies import run_snippet

PAGE = (Path(__file__).parents[3] / "docs/how-to/migration.md").read_text(encoding="utf-8")


def snippets(section: str) -> list[str]:
    """The Python of one section: before and after."""
    text = PAGE.partition(f"## From {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_from_ddp(ranks: RankPool) -> None:
    before, after = (ranks.run(run_snippet, code) for code in snippets("DistributedDataParallel"))
    assert len(before[0]) == 16
    for ours, theirs in zip(after, before, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert before[0] != before[1], "each rank has samples of its own"


def test_from_deepspeed(ranks: RankPool, deepspeed_ranks: RankPool) -> None:
    before, after = snippets("DeepSpeed")
    theirs = deepspeed_ranks.run(run_snippet, before)
    assert theirs[0][-1] < theirs[0][0]
    assert ranks.run(run_snippet, after)[0] == pytest.approx(theirs[0], rel=1e-4)
    with_deepspeed = after.replace('backend="native"', 'backend="deepspeed"')
    assert with_deepspeed != after
    assert deepspeed_ranks.run(run_snippet, with_deepspeed)[0] == pytest.approx(theirs[0], rel=1e-4)


def test_from_fairscale(ranks: RankPool) -> None:
    """FairScale is not maintained any more, so that only what replaces it is run."""
    before, after = snippets("FairScale")
    ast.parse(before)
    losses = ranks.run(run_snippet, after)[0]
    assert losses[-1] < losses[0]
