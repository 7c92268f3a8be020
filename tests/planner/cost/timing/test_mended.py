"""Terms of the time model that stand where constants stood in: each moves what it should, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_db.datasheets import find_device
from planner.cost.timing import step_time
from planner.cost.timing.collectives import Group, dispatch_seconds
from planner.cost.timing.compute import HOOK_SECONDS
from planner.cost.timing.efficiency import FP32_CEILING, GEMM_CEILING, device_rates
from planner.cost.timing.layout import slowest_share
from planner.cost.timing.pipeline import _other_nodes
from planner.models.catalogue import find_model
from tests.planner.cost.timing.cases import cluster, make_job


def test_fp32_products_run_near_their_peak_where_they_do() -> None:
    volta = replace(cluster(), device=find_device("V100-SXM2-32GB"))
    assert device_rates(volta, "fp32").gemm_flops == pytest.approx(15.7e12 * FP32_CEILING["volta"])
    assert device_rates(volta, "fp16").gemm_flops == pytest.approx(125e12 * GEMM_CEILING["volta"])


def test_hooks_of_zero3_take_the_host() -> None:
    def compute(tokens: int, samples: int, backend: str = "deepspeed") -> float:
        job = make_job("gpt2-xl", strategy="zero3", sequence_length=tokens, micro_batch_size=samples)
        chosen = replace(job.configuration, backend=backend)
        return step_time(replace(job, configuration=chosen)).compute_seconds

    tensors = 12 * 48
    assert compute(64, 1) - compute(64, 1, "native") == pytest.approx(2 * HOOK_SECONDS * tensors, rel=0.02)
    assert compute(1024, 64) == pytest.approx(compute(1024, 64, "native"), rel=0.01)  # hidden behind the device


def test_a_token_crosses_to_a_node_once() -> None:
    facts = find_model("deepseek-v3")
    assert _other_nodes(facts, 8) == pytest.approx(7 / 8 * 4 * (1 - 0.75**8))
    spread = replace(facts, expert_groups=0)
    assert _other_nodes(spread, 8) == pytest.approx(7 * (1 - (7 / 8) ** 8))
    nodes = cluster(nodes=8)
    members = Group(size=64, per_node=8, nodes=8, sharing=1)
    once = dispatch_seconds(nodes, 1e9, 8, _other_nodes(facts, 8), members)
    twice = dispatch_seconds(nodes, 1e9, 8, 2 * _other_nodes(facts, 8), members)
    assert twice == pytest.approx(2 * once, rel=0.01)  # the NICs decide


def test_more_ranks_wait_longer() -> None:
    assert slowest_share(8) == slowest_share(1) == 0
    shares = [slowest_share(ranks) for ranks in (16, 64, 512, 2048)]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.013 * (3.04 - 1.42), rel=0.05)  # expected largest of 512 and of 8 normal values
