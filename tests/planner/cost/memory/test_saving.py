"""The save phase against a state dict that FSDP2 gathers on two real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.load import saving_of
from planner.cost.memory.states import states_of
from planner.cost.precision import recipe_of
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import price
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from tests.planner.cost.memory import load_bodies, save_bodies


def test_a_full_save_of_shards_holds_the_largest_tensor_twice_and_all_of_it_on_rank_0(
    new_pool: Callable[..., RankPool],
) -> None:
    with new_pool(2, timeout_seconds=300) as pool:
        (held, peak), (held_elsewhere, _) = pool.run(save_bodies.gather_full)
    cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=2))
    question = make_request(facts_from_config(load_bodies.CONFIG, "small-llama"), cluster, WorkOptions(seq_len=64))
    request, configuration = exact(question, ExactOptions(strategy="fsdp"))
    job = price(replace(request, workload=replace(request.workload, save="full")), configuration).job
    recipe = recipe_of(job)
    saving = saving_of(job, recipe, states_of(job, recipe))
    assert held_elsewhere == 0
    assert saving.host_of_rank_0 == pytest.approx(held, rel=0.01)
    # On a CPU what is moved to the host is what was gathered, so that the last tensor counts once.
    table = 4 * job.facts.vocab_size * job.facts.hidden_size
    assert saving.host_of_rank_0 - table + saving.device.total == pytest.approx(peak, rel=0.01)
