"""Walks of the strategies on two streams: who waits for what, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hardware_db.device import Device
from planner.cost.code_bases import code_base
from planner.cost.timing import step_time
from planner.cost.timing.data_parallel import Communication, data_parallel
from planner.cost.timing.efficiency import device_rates
from planner.cost.timing.layout import SERIAL_SLOWDOWN, SLOWDOWN, beside, layout
from planner.cost.timing.offload import NVME_BYTES_PER_S, _native_disk_seconds
from planner.cost.timing.pipeline import stages
from planner.types.cluster import Rates, constant_rate
from planner.types.job import Job
from tests.planner.cost.timing.cases import cluster, make_job, on

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def rates_of(bytes_per_s: float) -> Rates:
    """Every collective takes its whole tensor over `bytes_per_s`, without latency."""
    return Rates(collectives={(name, 8): constant_rate(bytes_per_s) for name in NAMES})


def walk(job: Job, code: str = "transformers") -> tuple[Communication, Any, Any]:
    rates = device_rates(job.cluster, job.configuration.precision, code_base(code).eager.time)
    where = layout(job)
    (stage,) = stages(job, rates)
    return data_parallel(job, where, stage, rates), where, stage


def test_side_by_side_the_longer_one_counts() -> None:
    assert beside(3.0, 2.0) == pytest.approx((SLOWDOWN - 1) * 2)
    assert beside(2.0, 3.0) == pytest.approx(1 + (SLOWDOWN - 1) * 2)
    assert beside(2.0, 3.0, slowdown=SERIAL_SLOWDOWN) == 3.0


def test_ddp_shows_the_embedding_alone_behind_a_fast_link() -> None:
    job = on(make_job("gpt2", micro_batch_size=8), rates=rates_of(1e11))
    communication, where, _ = walk(job)
    assert communication.total == pytest.approx(where.parameters * 4 / 1e11)
    embedding = job.counts.embedding * 4 / 1e11
    assert communication.exposed == pytest.approx(embedding + (SLOWDOWN - 1) * (communication.total - embedding))


def test_fsdp_waits_for_every_gather_that_a_block_cannot_hide() -> None:
    job = on(make_job("facebook/opt-6.7b", strategy="fsdp"), rates=rates_of(1e8))
    communication, where, stage = walk(job)
    gather, root = where.block * 2 / 1e8, where.root * 2 / 1e8
    reduce, reduce_root = where.block * 4 / 1e8, where.root * 4 / 1e8
    assert communication.total == pytest.approx(where.layers * (2 * gather + reduce) + root + reduce_root)
    # Behind a link this slow every block's compute is hidden, the last block's and the head's forward are not.
    hidden = (where.layers - 1) * stage.block.forward + where.layers * stage.block.backward + stage.head.backward
    assert communication.exposed == pytest.approx(communication.total - hidden * (2 - SLOWDOWN))


def test_fsdp_shows_the_first_gathers_and_the_last_reductions_of_a_fast_link() -> None:
    job = on(make_job("facebook/opt-6.7b", strategy="fsdp", micro_batch_size=8), rates=rates_of(1e12))
    communication, where, _ = walk(job)
    visible = ((where.block + where.root) * 2 + (where.block + where.root) * 4) / 1e12
    assert communication.exposed == pytest.approx(visible + (SLOWDOWN - 1) * (communication.total - visible))


def test_zero_hides_nothing_of_a_model_that_fits_one_bucket() -> None:
    small = on(make_job("gpt2", strategy="zero2", micro_batch_size=8), rates=rates_of(1e10))
    communication, _, _ = walk(small)
    assert communication.exposed == communication.total
    large = on(make_job("facebook/opt-6.7b", strategy="zero2", micro_batch_size=8), rates=rates_of(1e11))
    communication, where, _ = walk(large)
    bucket, gathered = where.parameters / 14 * 2 / 1e11, where.parameters * 2 / 1e11
    assert communication.exposed == pytest.approx(bucket + gathered + (SLOWDOWN - 1) * 13 * bucket)


def test_partitions_broadcast_in_turn_pay_a_latency_each() -> None:
    job = make_job("facebook/opt-1.3b", cluster(nodes=16), strategy="zero1")
    whole, _, _ = walk(job)
    apart, _, _ = walk(job, "internevo")
    assert apart.total > 1.5 * whole.total


def test_zero3_gathers_a_small_model_once() -> None:
    small = on(make_job("gpt2", strategy="zero3"), rates=rates_of(1e10))
    communication, where, _ = walk(small)
    gathered = where.parameters * 2 / 1e10
    reduced = communication.total - gathered
    assert reduced == pytest.approx(gathered, rel=0.01)


def test_replicas_reduce_what_the_shards_have_left() -> None:
    nodes = cluster(nodes=4)
    communication, where, _ = walk(make_job("facebook/opt-6.7b", nodes, strategy="hsdp", dp_replicate=4))
    twice, once = where.parameters + where.layers * where.block, where.parameters
    inside = 7 / 8 * (2 * twice / 234.9e9 + 4 * once / 234.9e9)
    # Eight groups of four replicas, each with an eighth of the gradients, share four NICs.
    between = 2 * 3 / 4 * 4 * once / (4 * 22.08e9)
    # Of all blocks but two the links inside nodes and those between them are busy at once.
    both = (where.layers - 2) * where.block * min(7 / 8 * (2 + 4) / 234.9e9, 2 * 3 / 4 * 4 / (4 * 22.08e9))
    assert communication.total == pytest.approx(inside + between - both, rel=0.05)


def test_our_own_zero_reduces_between_copies_once_a_step() -> None:
    """In four micro-batches DeepSpeed's kind all-reduces 2 bytes four times, ours 4 bytes once."""
    steps = {"gradient_accumulation_steps": 4}
    job = make_job("facebook/opt-6.7b", cluster(nodes=4), strategy="zero2", dp_replicate=4, **steps)
    each, where, _ = walk(job)
    once, _, _ = walk(replace(job, configuration=replace(job.configuration, backend="native")))
    between = 2 * 3 / 4 * where.parameters / (4 * 22.08e9)
    assert each.total - once.total == pytest.approx((4 * 2 - 4) * between, rel=0.05)


def test_zero_plus_sends_fewer_bytes_and_gathers_in_the_node_for_backward() -> None:
    def total(**changes: Any) -> float:
        communication, _, _ = walk(make_job("facebook/opt-6.7b", cluster(nodes=4), strategy="zero3", **changes))
        return communication.total

    job = make_job("facebook/opt-6.7b", cluster(nodes=4), strategy="zero3")
    elements = layout(job).parameters
    again = 1 - 5e8 / elements  # what is used again soon enough is not freed
    between, inside = 31 / 32 / (4 * 22.08e9), 7 / 8 / 234.9e9  # seconds of a byte
    saved = {
        "quantized_weights": (1 + again) * (2 - 1) * elements * between,
        "quantized_gradients": (2 - 0.5) * elements * between,
    }
    for name, seconds in saved.items():
        assert total() - total(**{name: True}) == pytest.approx(seconds, rel=0.08), name
    seconds = again * 2 * elements * (between - inside)
    assert seconds < total() - total(hpz_partition_size=8) < 1.3 * seconds, "a collective of one node has fewer steps"


def test_on_a_cpu_ranks_compute_or_talk() -> None:
    processor = Device(name="CPU", vendor="cpu", architecture="x86")
    job = on(make_job("gpt2", cluster(8), strategy="fsdp"), device=processor, rates=rates_of(1e9))
    communication, _, _ = walk(job)
    assert communication.exposed == pytest.approx(communication.total)


def test_offloaded_gradients_leave_behind_the_backward() -> None:
    fast = Rates(host_to_device=constant_rate(1e12), device_to_host=constant_rate(1e12))
    slow = replace(fast, device_to_host=constant_rate(1e9))
    job = make_job("facebook/opt-6.7b", strategy="zero2", offload="optimizer", micro_batch_size=8)
    gradients = job.counts.total / 8 * 2
    hidden, shown = (step_time(on(job, rates=rates)).offload_seconds for rates in (fast, slow))
    assert hidden == pytest.approx(gradients / 1e12 + (SLOWDOWN - 1) * gradients / 1e12)
    assert shown < gradients / 1e9 + hidden


def test_disks_are_read_and_written_at_their_own_rates() -> None:
    job = make_job("facebook/opt-6.7b", strategy="zero3", offload="nvme")
    fast = Rates(disk_read=constant_rate(1e12), disk_write=constant_rate(1e10))
    states = 12 * job.counts.total
    written = states / 1e10
    read = (states + 2 * 2 * job.counts.total) / 1e12
    without = step_time(make_job("facebook/opt-6.7b", strategy="zero3", offload="all")).offload_seconds
    assert step_time(on(job, rates=fast)).offload_seconds == pytest.approx(without + written + read)


@pytest.mark.parametrize(
    ("precision", "optimizer", "stored"),
    [("bf16", "adamw", 12), ("bf16", "lion", 8), ("fp32", "adamw", 8), ("bf16-pure", "adamw", 4)],
)
def test_native_nvme_reads_and_writes_what_memory_says_is_stored(precision: str, optimizer: str, stored: int) -> None:
    """Masters only beside 16-bit weights, and the optimizer's own moments; stage 3's weights are stepped in place."""
    job = make_job("facebook/opt-6.7b", strategy="zero3", offload="nvme", precision=precision, optimizer=optimizer)
    job = replace(job, configuration=replace(job.configuration, backend="native"))
    seconds = _native_disk_seconds(job, 1e9)
    assert seconds == pytest.approx(2 * stored * 1e9 * job.cluster.gpus_per_node / NVME_BYTES_PER_S)
