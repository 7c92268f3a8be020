"""Failures: the intervals and the goodput that Young, Daly and the exact form give, and published rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hardware_db.datasheets import failure_record, recovery
from planner.cost.failures import Outlook, best_interval, checkpoint_bytes, daly, goodput, outlook, young
from planner.search.estimate import job_of
from planner.types.cluster import Reliability
from planner.types.job import Job
from planner.types.plan import Configuration
from tests.planner.search.questions import question

HOUR = 3600.0


def test_the_interval_is_youngs_where_saving_is_short_and_dalys_higher_order_form_is_near_it() -> None:
    assert best_interval(40, 168 * HOUR) == pytest.approx(young(40, 168 * HOUR), rel=0.005)
    assert best_interval(40, 168 * HOUR) == pytest.approx(daly(40, 168 * HOUR), rel=1e-6)
    assert best_interval(60, 600) == pytest.approx(daly(60, 600), rel=0.001)


@pytest.mark.parametrize(("save", "mttf"), [(40, 168 * HOUR), (2.3, 3.09 * HOUR), (60, 600), (4700, HOUR), (1e6, 1)])
def test_no_other_interval_has_a_larger_goodput(save: float, mttf: float) -> None:
    best = best_interval(save, mttf)
    at_best = goodput(best, save=save, restart=660, mttf=mttf)
    for factor in (0.5, 0.9, 1.1, 2):
        assert goodput(factor * best, save=save, restart=660, mttf=mttf) <= at_best


def test_a_save_that_costs_nothing_leaves_only_the_restarts() -> None:
    assert best_interval(0, HOUR) == 0
    assert goodput(0, save=0, restart=0.1 * HOUR, mttf=HOUR) == pytest.approx(math.exp(-0.1))
    late = goodput(60, save=0, restart=0, mttf=HOUR, written=0.1 * HOUR)
    assert late == pytest.approx(math.exp(-0.1), rel=0.01), "what is not written yet is lost like a restart"


def test_failures_are_those_of_the_publications_that_stand_beside_them() -> None:
    """Llama 3: 419 in 54 days of 2,048 nodes; Meta's RSC: 1.8 h on 16,384 GPUs, 0.23 h on 131,072."""
    llama, rsc = failure_record("H100-SXM5-80GB"), failure_record("A800-PCIE-80GB")
    assert llama is not None
    assert rsc is not None
    assert llama.per_1000_node_days * 2.048 * 54 == pytest.approx(419, rel=0.001)
    for gpus, hours in ((16_384, 1.8), (131_072, 0.23)):
        ahead = replace(_ahead(), nodes=gpus // 8, per_1000_node_days=rsc.per_1000_node_days)
        assert ahead.mttf_seconds / HOUR == pytest.approx(hours, rel=0.03)
    assert failure_record("RTX-4090") is None


def _ahead() -> Outlook:
    return Outlook(
        nodes=1,
        per_1000_node_days=1,
        least_per_1000_node_days=1,
        most_per_1000_node_days=1,
        said="a test",
        restart_seconds=660,
        checkpoint_bytes=1,
        save_seconds=10,
        step_seconds=7,
    )


def test_checkpoints_come_after_whole_steps() -> None:
    ahead = replace(_ahead(), nodes=1000)
    assert ahead.interval_seconds % 7 == 0
    assert ahead.interval_seconds == pytest.approx(best_interval(10, 86_400), abs=3.5)
    never = replace(ahead, per_1000_node_days=0)
    assert never.goodput == never.goodput_every(math.inf) == 1.0
    assert never.goodput_every(90) == pytest.approx(0.9)


def test_a_checkpoint_has_weights_masters_and_moments_and_a_cluster_says_how_fast_it_is_written() -> None:
    """BLOOM: 2 + 4 + 8 bytes of 176.2 B parameters, 2.47e12, where its log rounds to 2.3 TB (2.24 TiB)."""
    request = question("bloom", "a100-80gb", 384)
    job = job_of(request, Configuration(strategy="zero1", backend="deepspeed", dp_shard=384, **_WORK))
    assert checkpoint_bytes(job) == pytest.approx(14 * job.counts.total)
    assert checkpoint_bytes(job) / 2**40 == pytest.approx(2.3, rel=0.05)
    ahead = outlook(job, 105.0)
    assert ahead is not None
    assert ahead.save_seconds == pytest.approx(40, rel=0.1)
    assert ahead.restart_seconds == 60 * recovery()["restart_minutes"]
    stated = Reliability(failures_per_1000_node_days=3.0, restart_minutes=5, save_seconds=1)
    told = outlook(job_of(replace(request, cluster=replace(request.cluster, reliability=stated)), job.configuration), 1)
    assert told is not None
    assert (told.per_1000_node_days, told.restart_seconds, told.save_seconds) == (3.0, 300, 1)


_WORK: dict[str, Any] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "global_batch_size": 384, "sequence_length": 2048,
    "precision": "bf16", "optimizer": "adamw", "attention": "sdpa",
}  # fmt: skip


def test_a_small_checkpoint_of_many_nodes_takes_what_the_ranks_wait_for_each_other() -> None:
    """1.4 GiB over 1,250 nodes are 1 ms of writing; the save is still 1.5 s, and does not come every few seconds."""
    many, one = outlook(_job("h100-80gb", 10_000), 0.05), outlook(_job("h100-80gb", 8), 0.05)
    assert many is not None
    assert one is not None
    assert many.save_seconds == recovery()["least_save_seconds"] == 1.5
    assert many.interval_seconds == pytest.approx(young(1.5, many.mttf_seconds), rel=0.02)
    assert one.save_seconds == pytest.approx(one.checkpoint_bytes / 1.2e9), "one node waits for no other"


def test_a_smaller_node_fails_less_often_and_an_unpublished_one_is_not_guessed() -> None:
    whole = outlook(_job("h100-80gb", 8), 1.0)
    half = outlook(_job("h100-80gb", 4), 1.0)
    assert whole is not None
    assert half is not None
    assert half.per_1000_node_days == pytest.approx(whole.per_1000_node_days / 2)
    assert outlook(_job("rtx-4090", 8), 1.0) is None


def _job(gpu: str, gpus: int) -> Job:
    work = _WORK | {"global_batch_size": gpus}
    ddp = Configuration(strategy="ddp", backend="torch", dp_replicate=gpus, **work)
    return job_of(question("gpt2", gpu, gpus), ddp)
