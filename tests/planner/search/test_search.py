"""The promises of the search: plans fit, the batch stays, the best is first, every loser has its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from planner import vocabulary as words
from planner.cluster.budget import Budget, bill_of, tokens_per_step
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.combinations import why_refused
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.evaluate import Candidate
from planner.search.ranking import ahead, group_name, simplicity, slower_threshold
from planner.search.request import WorkOptions, make_request
from planner.search.search import Recommendation, can_fit, recommend
from planner.search.space import enumerate_candidates
from tests.planner.search.exhaustive import everything_that_fits
from tests.planner.search.questions import question


def every(answer: Recommendation) -> list[str]:
    return [plan.configuration.strategy for plan in answer.plans] + [item.strategy for item in answer.rejected]


@settings(max_examples=6, deadline=None)
@given(
    model=some.sampled_from(["gpt2", "opt-1.3b", "llama-3-8b", "bert-large", "t5-3b", "mixtral-8x7b"]),
    gpu=some.sampled_from(["rtx4090", "a100-40gb", "h100"]),
    gpus=some.sampled_from([1, 2, 8, 16]),
    per_gpu=some.sampled_from([1, 3, 8]),
    objective=some.sampled_from(get_args(words.Objective)),
)
def test_every_plan_fits_and_keeps_the_batch(model: str, gpu: str, gpus: int, per_gpu: int, objective: str) -> None:
    request = question(model, gpu, gpus, global_batch=gpus * per_gpu, objective=objective)
    answer = recommend(request)
    for plan in answer.plans:
        configuration = plan.configuration
        assert plan.verdict in ("fits", "tight")
        assert plan.memory.device_needed_bytes <= request.cluster.capacity_bytes
        has_room = plan.memory.device_used_upper_bytes <= request.cluster.capacity_bytes
        assert has_room or plan.verdict == "tight"
        product = configuration.micro_batch_size * configuration.gradient_accumulation_steps
        assert product * configuration.dims.data_parallel == gpus * per_gpu
    if answer.plans:
        assert answer.plans[0].runnable
    else:
        assert answer.closest is not None
        assert answer.closest.verdict == "does_not_fit"
    named = {name.split(" + ")[0] for name in every(answer)}
    assert named == set(words.STRATEGIES)


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    request = question("opt-1.3b", "a100-40gb", 8, global_batch=512, strategies=("ddp",))
    whole = [plan.configuration for plan in recommend(request).plans if not plan.configuration.splits_model]
    (micro,) = {configuration.micro_batch_size for configuration in whole}
    doubled = recommend(replace(request, micro_batch=2 * micro))
    whole = [plan.configuration for plan in doubled.plans if not plan.configuration.splits_model]
    assert all(configuration.activation_checkpointing != "none" for configuration in whole)


def test_a_small_model_on_one_fast_node_is_replicated() -> None:
    assert recommend(question("opt-125m", "a100-80gb", 8)).plans[0].configuration.strategy == "ddp"


def test_a_large_model_is_sharded_and_ddp_says_what_it_lacks() -> None:
    answer = recommend(question("opt-6.7b", "a100-80gb", 8))
    assert answer.plans[0].configuration.strategy in ("fsdp", "zero2", "zero3", "fsdp-grad-op", "zero1")
    (ddp,) = [item for item in answer.rejected if item.strategy == "ddp"]
    assert "needs up to" in ddp.reason
    assert ddp.plan is not None
    assert ddp.plan.verdict == "does_not_fit"


def test_nothing_fits_is_an_answer_whose_remedies_hold() -> None:
    request = question("llama-2-70b", "rtx4090", 1)
    request = replace(request, cluster=replace(request.cluster, nvme_bytes_per_node=0))
    answer = recommend(request)
    assert not answer.plans
    assert answer.closest is not None
    assert answer.remedies
    more = [remedy for remedy in answer.remedies if remedy.flag.startswith("--gpus")]
    gpus = int(more[0].flag.split()[1])
    assert can_fit(question("llama-2-70b", "rtx4090", gpus, global_batch=gpus)) is not None


def test_a_limit_of_ones_own_is_what_is_to_be_raised() -> None:
    """The card has 80 GB: another card is no remedy."""
    answer = recommend(question("opt-1.3b", "a100-80gb", 1, global_batch=1, max_memory_gb=1.0))
    assert not answer.plans
    flag = next(remedy.flag for remedy in answer.remedies if "memory" in remedy.flag)
    assert not [remedy for remedy in answer.remedies if remedy.flag.startswith("--gpu ")]
    enough = float(flag.removeprefix("--max-memory-gb "))
    assert recommend(question("opt-1.3b", "a100-80gb", 1, global_batch=1, max_memory_gb=enough)).plans


def test_a_batch_that_cannot_be_split_names_its_neighbours() -> None:
    sentence = "60 cannot be split evenly over 8 GPUs; use 56 or 64"
    with pytest.raises(ContradictoryRequest, match=sentence):
        recommend(question("mamba-130m", "a100-80gb", 8, global_batch=60))
    answer = recommend(question("opt-1.3b", "a100-80gb", 8, global_batch=60))
    assert sentence in answer.choice
    assert all(plan.configuration.splits_model and plan.runnable for plan in answer.plans)
    reasons = {item.strategy: item.reason for item in answer.rejected}
    assert reasons["ddp"] == "global batch 60 cannot be split over 8 data-parallel ranks"


@pytest.mark.slow
def test_objectives_rank_by_what_they_name() -> None:
    fast = recommend(question("opt-1.3b", "a100-80gb", 8)).plans[0]
    small = recommend(question("opt-1.3b", "a100-80gb", 8, objective="memory")).plans[0]
    cheap = recommend(question("opt-1.3b", "a100-80gb", 8, objective="cost")).plans[0]
    assert small.memory.device_used_bytes < fast.memory.device_used_bytes
    assert cheap.configuration.world_size < 8
    seconds = fast.time.step_seconds * fast.configuration.world_size
    assert cheap.time.step_seconds * cheap.configuration.world_size < seconds


def test_the_same_question_has_the_same_answer() -> None:
    assert recommend(question("gpt2", "a100-80gb", 4)) == recommend(question("gpt2", "a100-80gb", 4))


def test_a_thousand_gpus_rank_plans_that_split_the_model_all_of_which_run() -> None:
    request = question("llama-2-70b", "h100", 1024, top=30)
    plans = recommend(request).plans
    assert any(plan.configuration.splits_model for plan in plans)
    assert all(plan.runnable and not why_refused(plan.configuration) for plan in plans)


def test_deepspeed_is_handed_whole_models_and_our_own_zero_runs_the_others() -> None:
    plans = recommend(question("opt-6.7b", "a100-80gb", 8, strategies=("zero1",), top=10)).plans
    backends = {plan.configuration.splits_model: plan.configuration.backend for plan in plans}
    assert backends == {False: "deepspeed", True: "native"}


def test_a_memory_cap_is_kept() -> None:
    capped = recommend(question("opt-1.3b", "a100-80gb", 8, max_memory_gb=16.0))
    assert capped.plans
    assert all(plan.memory.device_needed_bytes <= 16e9 for plan in capped.plans)


def test_the_answer_does_not_depend_on_how_python_hashes(tmp_path: Path) -> None:
    line = "recommend --model llama-3-8b --gpus 8 --gpu h100 --objective cost --pareto --price 2 --json"
    answers = set()
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "DSPLAN_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "dsplan", *line.split()]
        finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        answers.add(finished.stdout)
    assert len(answers) == 1


def test_a_simpler_plan_goes_first_unless_it_is_slower_beyond_what_can_be_told() -> None:
    request = question("opt-1.3b", "a100-80gb", 8)
    ranked = recommend(request).plans
    by_speed = recommend(replace(request, simplest_first=False)).plans
    seconds = [plan.time.step_seconds for plan in by_speed]
    assert seconds == sorted(seconds)
    assert simplicity(ranked[0].configuration) <= simplicity(by_speed[0].configuration)
    allowed = 1 + slower_threshold(ranked[0].configuration, by_speed[0].configuration)
    assert ranked[0].time.step_seconds <= by_speed[0].time.step_seconds * allowed


@pytest.mark.parametrize("objective", get_args(words.Objective))
def test_every_choice_is_explained_in_one_line(objective: words.Objective) -> None:
    answer = recommend(question("llama-3-8b", "a100-80gb", 8, objective=objective))
    assert answer.choice.startswith(group_name(answer.plans[0].configuration))
    assert "\n" not in answer.choice


def test_with_a_deadline_only_plans_in_time_are_shown_and_the_rest_say_how_long_they_take() -> None:
    request = question("opt-1.3b", "a100-80gb", 8, global_batch=512)
    fastest = recommend(request).plans[0]
    day_tokens = 86_400 / fastest.time.step_seconds * tokens_per_step(request.workload)
    budget = Budget(tokens=day_tokens, deadline_days=1.3, usd_per_gpu_hour=2.0)
    answer = recommend(replace(request, budget=budget))
    assert answer.plans
    for plan in answer.plans:
        bill = bill_of(plan.configuration, plan.time.step_seconds, 2.0, budget)
        assert bill.days is not None
        assert bill.days <= 1.3
        assert bill.usd == pytest.approx(bill.days * 24 * 8 * 2.0)
    late = [item for item in answer.rejected if "takes" in item.reason]
    assert late
    assert all(item.plan and item.plan.time.step_seconds > 1.3 * fastest.time.step_seconds * 0.99 for item in late)
    assert [devices.gpus for devices in answer.on_devices if devices.in_time] == [8]
    assert answer.on_devices[0].gpus == 4


def test_devices_are_in_time_where_any_plan_is() -> None:
    request = question("opt-1.3b", "a100-80gb", 4)
    simplest = recommend(request).plans[0].time.step_seconds
    fastest = recommend(replace(request, simplest_first=False)).plans[0].time.step_seconds
    assert fastest < 0.97 * simplest
    tokens = 86_400 / ((simplest + fastest) / 2) * tokens_per_step(request.workload)
    answer = recommend(replace(request, budget=Budget(tokens=tokens, deadline_days=1.0)))
    assert answer.plans
    assert [devices.gpus for devices in answer.on_devices if devices.in_time] == [4]


def test_a_deadline_that_nothing_meets_names_the_devices_that_would() -> None:
    request = question("opt-1.3b", "a100-80gb", 8, global_batch=512)
    step = recommend(request).plans[0].time.step_seconds
    tokens = 86_400 / step * tokens_per_step(request.workload)
    answer = recommend(replace(request, budget=Budget(tokens=tokens, deadline_days=0.4)))
    assert not answer.plans
    assert answer.closest is not None
    assert answer.closest.verdict != "does_not_fit"
    no_plan = answer.no_plan()
    assert no_plan.headline == "no plan that fits ends in 9.6 h"
    assert no_plan.takes
    assert no_plan.takes in no_plan.sentence
    assert "opt-1.3b on 8 x A100-SXM4-80GB does not end in 9.6 h: closest is " in no_plan.sentence
    (remedy,) = answer.remedies
    assert no_plan.steps == (f"  1. {remedy.change} ({remedy.flag}): {remedy.plan}",)
    gpus = int(remedy.flag.split()[1])
    enough = question("opt-1.3b", "a100-80gb", gpus, global_batch=512, budget=Budget(tokens=tokens, deadline_days=0.4))
    assert recommend(enough).plans


def test_what_does_not_fit_is_said_once_with_the_reason_of_the_miss() -> None:
    answer = recommend(question("opt-6.7b", "rtx4090", 1, host_memory_gb=8))
    assert answer.closest is not None
    no_plan = answer.no_plan()
    assert no_plan.headline == "no plan fits"
    assert not no_plan.takes
    assert "needs up to " in no_plan.sentence
    assert no_plan.sentence.startswith("facebook/opt-6.7b does not fit on 1 x RTX-4090: closest is ")
    # What `dsplan run` cannot run of the closest miss stands in front of the reason, and is none.
    blocked = replace(answer.closest, runnable=False, notes=("another tool runs it", *answer.closest.notes))
    assert replace(answer, closest=blocked).no_plan().sentence == no_plan.sentence
    alone = replace(answer, remedies=()).no_plan()
    assert len(alone.steps) == 1
    assert alone.steps[0] in alone.sentence


@pytest.mark.slow  # test_exploration.py has the front beside every configuration
def test_no_plan_of_the_front_is_beaten_and_the_fastest_is_on_it() -> None:
    request = question("llama-3-8b", "a100-80gb", 8)
    answer = recommend(request, with_front=True)
    figures = [
        (plan.configuration.world_size, plan.time.step_seconds, plan.memory.device_used_bytes) for plan in answer.front
    ]
    for figure in figures:
        beaten = [
            other for other in figures if other != figure and all(a <= b for a, b in zip(other, figure, strict=True))
        ]
        assert not beaten
    fastest = min(item.time.step_seconds for item in everything_that_fits(request) if item.plan.runnable)
    assert min(seconds for _, seconds, _ in figures) <= fastest * 1.1


def test_one_consumer_gpu_is_offered_adapters_beside_offload() -> None:
    cluster = resolve_cluster(HardwareRequest(gpu="RTX-4090", gpus=1))
    answer = recommend(make_request(find_model("llama-3-8b"), cluster, WorkOptions(precision="bf16")))
    assert answer.plans[0].configuration.offload != "none"
    assert [item.flag for item in answer.remedies] == ["--method lora", "--method qlora"]
    assert all("x as fast as the first plan" in item.plan for item in answer.remedies)
    with_qlora = recommend(
        make_request(find_model("llama-3-8b"), cluster, WorkOptions(precision="bf16", method="qlora"))
    )
    # 22.5 of 23.6 GiB is tight, so that one with room stands beside it, on the device as well.
    verdicts = [(plan.configuration.strategy, plan.verdict) for plan in with_qlora.plans]
    assert verdicts == [("single", "tight"), ("single", "fits"), ("fsdp", "fits")]
    assert "; the second plan has room, at " in with_qlora.choice
    assert not with_qlora.remedies


def test_plans_that_mostly_wait_are_last_resorts() -> None:
    cluster = resolve_cluster(HardwareRequest(gpu="RTX-4090", gpus=1))
    options = WorkOptions(precision="bf16", seq_len=128, global_batch=1)
    answer = recommend(make_request(find_model("llama-3-8b"), cluster, options))
    slow = [plan for plan in answer.plans if (plan.throughput.mfu or 0) < 0.02]
    assert slow
    assert all("a last resort" in plan.notes[0] for plan in slow)
    llama = make_request(find_model("llama3-70b"), resolve_cluster(HardwareRequest(gpu="H100", gpus=1)), WorkOptions())
    closest = recommend(llama).closest
    assert closest is not None
    assert "host memory" in closest.notes[0]
    assert "a last resort" in closest.notes[1]
    order = [(plan.throughput.mfu or 0) < 0.02 for plan in answer.plans]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [("opt-6.7b", "a100-80gb", 8), ("llama-3-70b", "h100", 64), ("gpt2", "4090", 4), ("mixtral-8x7b", "h100", 32)],
)
@pytest.mark.sweep(every=2)
def test_no_runnable_plan_beats_the_first_by_a_fifth(model: str, gpu: str, gpus: int) -> None:
    request = question(model, gpu, gpus)
    first = recommend(request).plans[0]
    by_time = recommend(replace(request, simplest_first=False, top=50)).plans
    assert first.runnable
    assert first.time.step_seconds <= 1.2 * min(plan.time.step_seconds for plan in by_time if plan.runnable)


def test_cost_puts_the_cheapest_first_on_however_many_devices() -> None:
    request = question("llama-3-8b", "a100-80gb", 8, objective="cost", top=50)
    answer = recommend(request)
    costs = [plan.time.step_seconds * plan.configuration.world_size for plan in answer.plans if plan.runnable]
    assert costs == sorted(costs)
    assert len({plan.configuration.world_size for plan in answer.plans}) > 1


def test_machines_that_are_rented_whole_are_not_priced_in_parts() -> None:
    rented = question("opt-1.3b", "h100", 16, objective="cost", top=50)
    rented = replace(rented, cluster=replace(rented.cluster, usd_per_gpu_hour=2.0))
    counts = {plan.configuration.world_size for plan in recommend(rented).plans}
    assert 8 in counts
    assert min(counts) == 8
    own = replace(rented, budget=Budget(usd_per_gpu_hour=2.0))
    assert min(plan.configuration.world_size for plan in recommend(own).plans) < 8


@pytest.mark.slow
def test_a_far_deadline_is_answered_with_the_devices_and_the_batch() -> None:
    request = question("llama-3-8b", "h100", 8)
    budget = Budget(tokens=1e12, deadline_days=30)
    answer = recommend(replace(request, budget=budget))
    assert not answer.plans
    flags = dict(zip(answer.remedies[0].flag.split()[::2], answer.remedies[0].flag.split()[1::2], strict=True))
    gpus, batch = int(flags["--gpus"]), int(flags["--global-batch"])
    assert batch % gpus == 0
    assert recommend(question("llama-3-8b", "h100", gpus, global_batch=batch, budget=budget)).plans
    assert not recommend(question("llama-3-8b", "h100", gpus // 2, global_batch=batch, budget=budget)).plans


def test_percentages_mean_what_they_say() -> None:
    request = question("gpt2", "a100-80gb", 1)
    layout = next(iter(enumerate_candidates(request)))
    some_plan = Candidate(request, layout).timed(0)
    first, quick, near, same = (
        replace(some_plan, time=replace(some_plan.time, step_seconds=seconds)) for seconds in (4.0, 1.0, 3.2, 3.999)
    )
    assert ahead(first, quick, "throughput") == "4.0x as fast"
    assert ahead(first, near, "throughput") == "25% faster"
    assert ahead(first, near, "cost") == "20% cheaper"
    assert ahead(first, same, "throughput") == "less than 1% faster"


def test_what_only_others_run_is_ranked_where_it_is_asked_for() -> None:
    request = question("llama-3-8b", "h100", 8, optimizer="muon", top=30)
    splits = [plan for plan in recommend(request).plans if plan.configuration.tp > 1]
    others = [plan for plan in recommend(replace(request, allow_unrunnable=True)).plans if plan.configuration.tp > 1]
    assert not splits
    assert others
    assert all(not plan.runnable and "Muon makes whole matrices" in plan.notes[0] for plan in others)


@pytest.mark.parametrize(("model", "gpu", "gpus"), [("llama-3.1-405b", "rtx3070", 1), ("mixtral-8x22b", "t4", 8)])
@pytest.mark.sweep(every=2)
def test_where_nothing_fits_there_is_a_closest_miss(model: str, gpu: str, gpus: int) -> None:
    answer = recommend(question(model, gpu, gpus))
    assert not answer.plans
    assert answer.closest is not None


@pytest.mark.parametrize("options", [{}, {"strategies": ("fsdp",)}, {"allow_unrunnable": True}])
@pytest.mark.parametrize(("model", "gpu", "gpus"), [("llama-3-8b", "h100", 8), ("llama-3-70b", "a100-80gb", 16)])
@pytest.mark.sweep(every=4, suite=lambda gpus, options: (gpus == 16) == ("strategies" in options))
def test_something_is_found_to_fit_where_anything_does(
    model: str, gpu: str, gpus: int, options: dict[str, object]
) -> None:
    request = question(model, gpu, gpus, **options)
    plan = can_fit(request)
    assert plan is not None
    assert plan.judgement.verdict != "does_not_fit"
    little = replace(request, workload=replace(request.workload, max_memory_bytes=10**9))
    assert can_fit(little) is None
    assert next(everything_that_fits(little), None) is None
