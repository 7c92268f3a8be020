"""Lightning's Fabric over dsplan's engine, beside Fabric's own DDP."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.integrations import lightning_bodies as bodies
from tests.strategies.integrations.test_lightning import STRATEGIES, arguments_of, require_same


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Any:
    """Return what Fabric's own DDP leaves, by the number of batches that are accumulated."""
    return cache(lambda accumulation: ranks.run(bodies.fabric_loop, None, accumulation))


@pytest.mark.sweep(every=4, suite=lambda strategy, accumulation: accumulation == 2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_under_fabrics_ddp(ranks: RankPool, reference: Any, strategy: str, accumulation: int) -> None:
    own, trained = reference(accumulation), ranks.run(bodies.fabric_loop, arguments_of(strategy), accumulation)
    require_same(own, trained)
    if strategy in ("ddp", "fsdp"):
        assert trained[0]["norms"] == pytest.approx(own[0]["norms"], abs=1e-4)


def test_another_strategy_goes_on_from_what_fabric_saved(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(bodies.fabric_loop, arguments_of("zero2"), 1, str(tmp_path), 2)
    resumed = ranks.run(bodies.fabric_resumed, arguments_of("fsdp"), str(tmp_path))
    again = ranks.run(bodies.fabric_loop, arguments_of("zero2"), 1, "", 1)
    assert resumed[0]["step"] == 1
    assert resumed[0]["rest"] == {}
    require_same([{**item, "losses": []} for item in again], [{**item, "losses": []} for item in resumed])
    assert trained[0]["losses"][0] == again[0]["losses"][0]
