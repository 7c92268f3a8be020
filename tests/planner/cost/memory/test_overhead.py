"""From allocated bytes to what the driver shows and to the bound that decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_db.probe import probe_hardware
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.cost.intervals import memory_headroom
from planner.cost.memory.allocator import CACHE, SEGMENT_BYTES
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.host import CPU_PROCESS_BYTES
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.overhead import (
    COMMUNICATOR_UPPER_BYTES,
    CONTEXT_UPPER_BYTES,
    FRAGMENTATION_UPPER,
    closed_form_margin,
    device_use,
    has_other_form,
)
from planner.models.catalogue import find_model
from planner.models.facts import TracedActivations
from planner.search.estimate import estimate, price
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.vocabulary import Precision, Strategy

GB = 10**9


def job_of(strategy: Strategy, gpus: int = 8) -> Job:
    cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=gpus))
    request = make_request(find_model("llama-3.2-1b"), cluster, WorkOptions(seq_len=512, precision="bf16"))
    return price(*exact(request, ExactOptions(strategy=strategy))).job


@pytest.mark.parametrize(("strategy", "cache"), [("ddp", "replica"), ("zero2", "zero"), ("fsdp", "fsdp")])
def test_the_cache_grows_where_there_is_room(strategy: Strategy, cache: str) -> None:
    use = device_use(job_of(strategy), 20 * GB, FRAGMENTATION_UPPER)
    assert use.reserved == pytest.approx(20 * GB * (1 + CACHE[cache]) + SEGMENT_BYTES)
    assert use.reserved + use.beside == use.used < use.upper


def test_the_bound_goes_beyond_what_is_needed_and_the_cache_makes_nothing_tight() -> None:
    """Of 85 GB, 70 are allocated: FSDP's cache would take 14 more, and gives way to what is asked for."""
    job = job_of("fsdp")
    use = device_use(job, 70 * GB, FRAGMENTATION_UPPER)
    room = memory_headroom(job)
    needed = 70 * GB * (1 + FRAGMENTATION_UPPER) + SEGMENT_BYTES + CONTEXT_UPPER_BYTES + COMMUNICATOR_UPPER_BYTES
    assert use.needed == pytest.approx(needed)
    assert use.upper == pytest.approx(needed * (1 + room.crowded))
    plenty = device_use(job, 20 * GB, FRAGMENTATION_UPPER)
    assert plenty.upper == pytest.approx(plenty.needed * (1 + room.roomy))
    assert use.used < 70 * GB * (1 + CACHE["fsdp"])


def test_one_process_has_no_communicator() -> None:
    alone = device_use(job_of("single", gpus=1), 10 * GB, 0.0)
    among_eight = device_use(job_of("ddp"), 10 * GB, 0.0)
    assert among_eight.beside - alone.beside == 688_000_000


def test_on_a_cpu_used_is_allocated_and_the_process() -> None:
    cluster = probed_cluster(probe_hardware(), ranks=2)
    request = make_request(find_model("gpt2"), cluster, WorkOptions(seq_len=128, precision="fp32"))
    memory = price(*exact(request, ExactOptions(strategy="ddp"))).memory
    assert memory.peak_reserved_bytes == memory.peak_allocated_bytes
    assert memory.device_used_bytes == memory.peak_allocated_bytes + CPU_PROCESS_BYTES
    assert memory.host_bytes_per_node == 2 * memory.device_used_bytes


def test_a_module_that_nothing_is_known_of_has_its_activations_once_more() -> None:
    job = job_of("single", gpus=1)
    peak = Ledger(parameters=6 * GB, activations=4 * GB)
    traced = {"fp32": TracedActivations(kept=1, forward=1, backward=1, block=1, boundary=1, products=1)}
    unknown = replace(job, facts=replace(job.facts, kind="custom"))
    traced_job = replace(job, facts=replace(job.facts, kind="custom", traced=traced))
    assert closed_form_margin(job, peak) == closed_form_margin(traced_job, peak) == FRAGMENTATION_UPPER
    assert closed_form_margin(unknown, peak) == pytest.approx(FRAGMENTATION_UPPER + 0.4)


def test_a_structure_that_was_never_traced_has_a_note() -> None:
    usual = job_of("single", gpus=1)
    traced_job = replace(usual, facts=find_model("gpt2"))
    strange = replace(traced_job, facts=replace(traced_job.facts, parallel_residual=True, qk_norm=True))
    has_note = []
    for job in (traced_job, strange):
        request = make_request(job.facts, job.cluster, WorkOptions(seq_len=128))
        notes = estimate(*exact(request, ExactOptions(strategy="single"))).notes
        has_note.append(any("no gpt2 of this structure was ever traced" in note for note in notes))
    assert has_note == [False, True]
    assert (has_other_form(traced_job), has_other_form(strange)) == (False, True)


def test_only_autocast_copies_the_weights_of_a_traced_module() -> None:
    read = TracedActivations(kept=1e6, forward=1e6, backward=1e6, block=1e5, boundary=1e4, products=1e4)
    gpt2 = find_model("gpt2")
    facts = replace(gpt2, kind="custom", traced={"fp32": read, "autocast": read})
    cluster = resolve_cluster(HardwareRequest(gpu="cpu", gpus=1))
    copied = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        request = make_request(gpt2, cluster, WorkOptions(seq_len=128, precision=precision))
        job = replace(price(*exact(request, ExactOptions(strategy="single"))).job, facts=facts)
        copied[precision] = phases_of(job)["forward"].temporaries
    blocks = job.counts.blocks
    assert copied == {"fp32": 0, "bf16": 2 * sum(block.repeats for block in blocks) * job.counts.largest_block}
