"""The whole step: its parts, what each strategy pays, and how it reacts to better hardware."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.timing import step_time, throughput
from planner.cost.timing.layout import layout
from planner.models.catalogue import find_model, models
from planner.models.facts import ModelFacts
from planner.types.cluster import Factors, Rates, constant_rate
from planner.types.job import Job
from planner.types.plan import StepTime
from tests.planner.cost.timing.cases import FIRST_OF_TYPE, SHARDED, cluster, make_job, on, run_by

EVERY_STRATEGY = ("ddp", *SHARDED)
ELSEWHERE = (
    ("V100-SXM2-16GB", "nvlink2-v100-dgx1"),
    ("RTX-4090", "pcie-host-staged"),
    ("H100-SXM5-80GB", "nvlink4-h100"),
    ("Apple-M2-Ultra", None),
    ("Gaudi2", "gaudi2-roce"),
    ("MI250X-GCD", "xgmi-mi250x"),
)


def parts(time: StepTime) -> float:
    """The documented sum."""
    return (
        time.compute_seconds
        + time.exposed_communication_seconds
        + time.offload_seconds
        + time.optimizer_seconds
        + time.bubble_seconds
    )


def check_sound(job: Job) -> StepTime:
    time = step_time(job)
    names = set(StepTime.__slots__) - {"phases"}
    values = [value for name in names if (value := getattr(time, name)) is not None] + list(time.phases.values())
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert time.step_seconds == pytest.approx(parts(time))
    assert 0 < time.exposed_communication_seconds <= time.communication_seconds * (1 + 1e-9)
    rate = throughput(job, time)
    assert rate.samples_per_second == pytest.approx(job.configuration.global_batch_size / time.step_seconds)
    assert rate.mfu is None or 0 < rate.mfu < 0.9
    return time


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
@pytest.mark.sweep(suite=lambda facts: FIRST_OF_TYPE[facts.model_type] is facts)
def test_every_catalogue_model_under_every_strategy(facts: ModelFacts) -> None:
    for strategy in EVERY_STRATEGY:
        check_sound(make_job(facts, strategy=strategy, micro_batch_size=2, gradient_accumulation_steps=2))


@pytest.mark.parametrize(("device", "link"), ELSEWHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_every_precision_on_other_devices(device: str, link: str | None, precision: str) -> None:
    where = cluster(4, device=device, intra=link, inter=None)
    for attention in ("sdpa", "eager"):
        check_sound(make_job("facebook/opt-1.3b", where, precision=precision, attention=attention, strategy="fsdp"))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 4), (4, 2), (8, 2)])
def test_model_parallel_plans(checkpointing: str, tp: int, pp: int) -> None:
    job = make_job(
        "facebook/opt-6.7b",
        cluster(nodes=2),
        tp=tp,
        pp=pp,
        gradient_accumulation_steps=8,
        activation_checkpointing=checkpointing,
    )
    time = step_time(job)
    assert time.step_seconds == pytest.approx(parts(time))
    assert (time.bubble_seconds > 0) == (pp > 1)


def test_recomputation_costs_a_forward() -> None:
    def compute(kind: str, code: str = "transformers") -> float:
        job = make_job("huggyllama/llama-7b", micro_batch_size=4, activation_checkpointing=kind)
        return step_time(run_by(job, code)).compute_seconds

    none, selective, full = (compute(kind) for kind in ("none", "selective", "full"))
    assert none < selective < full
    whole = compute("full", "transformers-2021")
    assert 1.3 < whole / none < 1.35
    # Nothing needs the output of the down projection, 22 % of a block's weights; norms and attention run again.
    assert 0.75 < (full - none) / (whole - none) < 0.85


def test_a_dropout_keeps_what_recomputation_would_skip() -> None:
    job = make_job("facebook/opt-6.7b", activation_checkpointing="full")
    assert step_time(job).compute_seconds == step_time(run_by(job, "transformers-2021")).compute_seconds


def test_the_bubble_of_equal_stages_is_the_stages_that_wait() -> None:
    facts = replace(find_model("facebook/opt-6.7b"), vocab_size=0)
    time = step_time(make_job(facts, cluster(4), pp=4, gradient_accumulation_steps=4, micro_batch_size=4))
    # 4 stages and 4 micro-batches: 3 of 4 micro-batch times are waited for, (p-1)/m of the compute.
    assert time.bubble_seconds == pytest.approx(0.75 * time.compute_seconds, rel=0.05)


def test_zero3_moves_half_as_much_again_as_ddp() -> None:
    # An all-gather or a reduce-scatter over 8 ranks moves 7/8 of the tensor, an all-reduce twice that.
    one_way = constant_rate(8 / 7 * 1e9)
    both_ways = constant_rate(4 / 7 * 1e9)
    collectives = {("all_reduce", 8): both_ways, ("all_gather", 8): one_way, ("reduce_scatter", 8): one_way}
    volume_only = Rates(collectives=collectives)
    ddp, zero3 = (
        step_time(on(make_job("facebook/opt-6.7b", strategy=name, precision="bf16-pure"), rates=volume_only))
        for name in ("ddp", "zero3")
    )
    # What is used again within 1e9 elements, half of them on the way there, is gathered once.
    gathers = 2 - 0.5e9 / 6658473984
    assert zero3.communication_seconds / ddp.communication_seconds == pytest.approx((gathers + 1) / 2, rel=0.01)
    assert ddp.communication_seconds == pytest.approx(2 * 7 / 8 * 2 * 6658473984 / 1e9, rel=1e-3)


def test_accumulation_saves_ddp_reductions_but_not_zero3_gathers() -> None:
    def communication(strategy: str, steps: int) -> float:
        job = make_job("facebook/opt-1.3b", strategy=strategy, gradient_accumulation_steps=steps)
        return step_time(job).communication_seconds

    assert communication("ddp", 8) == communication("ddp", 1)
    assert communication("zero3", 8) == pytest.approx(8 * communication("zero3", 1))
    assert communication("zero1", 8) == communication("zero1", 1) < communication("zero2", 8)
    assert communication("fsdp-grad-op", 8) < communication("fsdp", 8)


@pytest.mark.parametrize(
    ("backend", "steps", "bytes_of_a_gradient"), [("native", 4, 4), ("native", 1, 2), ("deepspeed", 4, 2)]
)
def test_gradients_that_wait_are_as_wide_as_the_backend_keeps_them(
    backend: str, steps: int, bytes_of_a_gradient: int
) -> None:
    """Our own ZeRO adds 16-bit gradients up in fp32; they travel in 16 bits all the same."""
    job = make_job(strategy="zero2", gradient_accumulation_steps=steps)
    where = layout(replace(job, configuration=replace(job.configuration, backend=backend)))
    assert where.gradient_bytes == bytes_of_a_gradient
    assert (where.gather_bytes, where.reduce_bytes, where.communication_bytes) == (2, 2, 2)


def test_a_single_gpu_does_not_communicate() -> None:
    job = make_job("facebook/opt-125m", cluster(1), strategy="single")
    assert step_time(job).communication_seconds == step_time(job).exposed_communication_seconds == 0


@pytest.mark.parametrize(("strategy", "offload"), [("zero2", "optimizer"), ("zero3", "all"), ("zero3", "nvme")])
def test_offload_costs_time(strategy: str, offload: str) -> None:
    plain = check_sound(make_job("facebook/opt-6.7b", strategy=strategy))
    moved = check_sound(make_job("facebook/opt-6.7b", strategy=strategy, offload=offload))
    assert plain.offload_seconds == 0 < moved.offload_seconds
    assert moved.optimizer_seconds > plain.optimizer_seconds
    assert moved.step_seconds > plain.step_seconds


def test_cpu_adam_shares_the_hosts_rate_among_its_ranks() -> None:
    # 10B parameters in 2.57 s on 48 cores: eight ranks own an eighth each and get an eighth of the host.
    job = make_job("facebook/opt-6.7b", strategy="zero2", offload="optimizer")
    assert step_time(job).optimizer_seconds == pytest.approx(job.counts.total / 10e9 * 2.57)


def test_hsdp_gathers_inside_the_node() -> None:
    where = cluster(nodes=4)
    steps = {"gradient_accumulation_steps": 8}
    whole = step_time(make_job("facebook/opt-6.7b", where, strategy="fsdp", sync_each_micro_batch=False, **steps))
    hybrid = step_time(
        make_job("facebook/opt-6.7b", where, strategy="hsdp", dp_replicate=4, sync_each_micro_batch=False, **steps)
    )
    assert hybrid.communication_seconds < whole.communication_seconds


def test_small_models_cannot_be_faster_than_the_host() -> None:
    tiny = step_time(make_job("facebook/opt-125m", cluster(1), strategy="single", sequence_length=16))
    assert tiny.compute_seconds > 12 * 3 * 0.5e-3


def test_measured_rates_are_used() -> None:
    job = make_job("facebook/opt-1.3b", micro_batch_size=4)
    slow = on(job, rates=Rates(matmul=constant_rate(1e12), memory=constant_rate(1e10)))
    flops = 6 * job.counts.total * 4 * job.configuration.sequence_length
    assert step_time(slow).compute_seconds > flops / 1e12
    assert step_time(slow).compute_seconds > 20 * step_time(job).compute_seconds


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from(EVERY_STRATEGY),
    factor=st.floats(1, 50),
    what=st.sampled_from(["memory", "matmul", "all_reduce", "host_to_device"]),
    steps=st.integers(1, 4),
    offload=st.booleans(),
)
def test_faster_parts_never_slow_a_step(strategy: str, factor: float, what: str, steps: int, offload: bool) -> None:
    base = {"memory": 1e12, "matmul": 1e14, "all_reduce": 1e10, "host_to_device": 1e10}
    where = "all" if strategy == "zero3" else "optimizer" if strategy.startswith("zero") else "none"
    job = make_job(
        "facebook/opt-1.3b",
        strategy=strategy,
        gradient_accumulation_steps=steps,
        offload=where if offload else "none",
    )

    def rates(constants: dict[str, float]) -> Rates:
        curves = {name: constant_rate(rate) for name, rate in constants.items() if name != "all_reduce"}
        return Rates(**curves, collectives={("all_reduce", 8): constant_rate(constants["all_reduce"])})

    slow, fast = rates(base), rates({**base, what: base[what] * factor})
    assert step_time(on(job, rates=fast)).step_seconds <= step_time(on(job, rates=slow)).step_seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(nodes=st.integers(1, 32), more=st.integers(1, 32), steps=st.integers(1, 4))
def test_more_gpus_at_the_same_batch_per_gpu_never_speed_a_ddp_step_up(nodes: int, more: int, steps: int) -> None:
    few = make_job("facebook/opt-125m", cluster(nodes=nodes), gradient_accumulation_steps=steps)
    many = make_job("facebook/opt-125m", cluster(nodes=nodes + more), gradient_accumulation_steps=steps)
    assert step_time(many).step_seconds >= step_time(few).step_seconds


@settings(max_examples=30, deadline=None)
@given(micro=st.integers(1, 16), strategy=st.sampled_from(EVERY_STRATEGY))
def test_a_larger_micro_batch_takes_longer_but_not_per_sample(micro: int, strategy: str) -> None:
    small = step_time(make_job("facebook/opt-1.3b", strategy=strategy, micro_batch_size=micro)).step_seconds
    large = step_time(make_job("facebook/opt-1.3b", strategy=strategy, micro_batch_size=2 * micro)).step_seconds
    assert small < large <= 2 * small


@pytest.mark.parametrize("name", Factors.__slots__)
def test_every_factor_multiplies_a_rate(name: str) -> None:
    # Small blocks wait for the host, two nodes use both links, offload the host's link and optimizer.
    job = make_job("facebook/opt-125m", cluster(nodes=2), strategy="zero2", offload="optimizer", micro_batch_size=8)
    if name == "launch":
        job = make_job("facebook/opt-125m", cluster(nodes=2), strategy="zero2", sequence_length=16)
    if name == "intra_link":
        job = make_job("facebook/opt-125m", strategy="zero2", micro_batch_size=8)
    slow, same, fast = (step_time(on(job, factors=Factors(**{name: value}))).step_seconds for value in (0.5, 1.0, 2.0))
    assert fast < same == step_time(job).step_seconds < slow <= 2.01 * same
