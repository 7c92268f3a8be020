"""The search prices a fraction of the configurations and finds what pricing all of them finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest

from planner.calibration.experience import Experience, KnownRun
from planner.search.device_counts import device_counts, on_fewer_devices
from planner.search.evaluate import Candidate, best, closest
from planner.search.pareto import ALIKE, pareto_front
from planner.search.ranking import Timed
from planner.search.request import Request
from planner.search.search import first_plan, group_candidates, recommend
from planner.search.space import enumerate_candidates
from planner.types.plan import Configuration
from tests.planner.search.exhaustive import best_by_group, everything_that_fits
from tests.planner.search.questions import question

MEGATRON = {"code": "megatron", "allow_unrunnable": True}
QUESTIONS = (
    ("opt-6.7b", "a100-80gb", 8, {}),
    ("llama-3-8b", "h100", 64, {"global_batch": 512}),
    ("llama-2-70b", "a100-40gb", 16, {"global_batch": 48}),
    ("t5-3b", "v100-32gb", 1, {"global_batch": 48}),
    ("mixtral-8x7b", "rtx4090", 32, {"global_batch": 96}),
    ("gpt2", "rtx4090", 4, {"global_batch": 12, "micro_batch": 3}),
    ("opt-1.3b", "a100-40gb", 8, {"objective": "cost", "global_batch": 24}),
    ("llama-3-8b", "h100", 16, {"objective": "cost"}),
    ("t5-3b", "rtx4090", 8, {"objective": "memory"}),
    ("vit-large", "a100-80gb", 8, {"objective": "memory", "global_batch": 384}),
    ("llama-3-8b", "h100", 4, {"objective": "memory", "global_batch": 8, "seq_len": 256}),
    ("mixtral-8x7b", "h100", 16, {"global_batch": 32, "code": "megatron", "allow_unrunnable": True}),
    ("llama-3-8b", "h100", 16, {"global_batch": 8, "seq_len": 65536, "code": "torchtitan", "allow_unrunnable": True}),
)


def searched(request: Request) -> dict[str, Timed]:
    bests = {name: best(group, request.objective) for name, group in group_candidates(request).items()}
    return {name: item for name, item in bests.items() if item is not None}


@pytest.mark.parametrize(("model", "gpu", "gpus", "options"), QUESTIONS)
@pytest.mark.sweep(every=4, suite=lambda model, gpus, options: "code" in options or (gpus < 16 and model != "opt-1.3b"))
def test_the_best_of_every_group_is_that_of_an_exhaustive_search(
    model: str, gpu: str, gpus: int, options: dict[str, object]
) -> None:
    request = question(model, gpu, gpus, **options)
    every, few = best_by_group(device_counts(request)), searched(request)
    assert {name: item.configuration for name, item in few.items()} == {
        name: item.configuration for name, item in every.items()
    }
    assert few


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "options"),
    [
        ("llama-3-70b", "h100", 32, {}),
        ("mixtral-8x7b", "h100", 16, {"global_batch": 32}),
        ("t5-3b", "a100-40gb", 4, {}),
        ("bert-large", "v100-32gb", 4, {"precision": "fp16"}),
        ("llama-2-13b", "rtx4090", 4, {"method": "qlora"}),
        ("llama-3-8b", "a100-80gb", 8, {"method": "lora", "loss": "fused"}),
        ("llama-3-8b", "a100-80gb", 8, {"task": "dpo"}),
        ("llama-3-8b", "h100", 16, MEGATRON),
    ],
)
def test_nothing_takes_less_than_it_is_left_out_for(
    model: str, gpu: str, gpus: int, options: dict[str, object]
) -> None:
    looked_at = 0
    for group in group_candidates(question(model, gpu, gpus, **options)).values():
        for candidate in group[::5]:
            for index in range(0, len(candidate.micros), 2):
                memory = candidate.priced(index).memory
                least = min(memory.device_least_bytes, memory.device_used_bytes, memory.device_needed_bytes)
                assert candidate.least_bytes(index) <= least
                looked_at += 1
    assert looked_at > 15


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_the_front_is_that_of_every_configuration(objective: str) -> None:
    request = question("opt-1.3b", "rtx4090", 2, objective=objective, global_batch=8)
    every = [
        _figures(item, request.objective)
        for option in (request, *on_fewer_devices(request))
        for item in everything_that_fits(option)
    ]
    unbeaten = {point for point in every if not any(other != point and _no_worse(other, point) for other in every)}
    figures = [_figures(item, request.objective) for item in pareto_front(request)]
    assert set(figures) <= unbeaten
    alike = [point for point in unbeaten if not any(_no_worse(other, point, 1 + ALIKE) for other in figures)]
    assert alike == []
    assert figures == [_figures(item, request.objective) for item in pareto_front(request, _every_candidate(request))]


Point = tuple[float, int, int]


def _no_worse(other: Point, point: Point, slack: float = 1.0) -> bool:
    return other[0] <= point[0] * slack and other[1] <= point[1] * slack and other[2] <= point[2]


def _figures(item: Timed, objective: str) -> Point:
    gpus = item.configuration.world_size
    weight = gpus if objective == "cost" else 1
    return item.time.step_seconds * weight, item.priced.memory.device_used_bytes, gpus


def _every_candidate(request: Request) -> Iterator[Candidate]:
    return chain.from_iterable(group_candidates(request).values())


@pytest.mark.parametrize(("model", "gpu", "gpus", "options"), QUESTIONS[2:6])
@pytest.mark.sweep(every=4)
def test_the_first_plan_alone_is_the_first_of_all(model: str, gpu: str, gpus: int, options: dict[str, object]) -> None:
    request = question(model, gpu, gpus, **options)
    first = first_plan(request)
    assert first is not None
    assert replace(first, alternatives=()) == replace(recommend(request).plans[0], alternatives=())


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "options", "most", "of"),
    [
        ("opt-6.7b", "a100-80gb", 8, {}, 120, 696),
        ("llama-3.1-405b", "h100", 16384, {**MEGATRON, "seq_len": 131072, "global_batch": 128}, 45, 1986),
        # Nothing fits, and every layout may be the closest miss; the rest is what remedies ask.
        ("llama-3.1-405b", "rtx3070", 1, {}, 30, 81),
        ("opt-125m", "rtx3070", 1, {"max_memory_gb": 0.4}, 900, 81),
        ("mixtral-8x22b", "t4", 64, {}, 400, 2679),
    ],
)
@pytest.mark.sweep(every=4)
def test_a_small_part_of_the_configurations_is_priced(
    model: str,
    gpu: str,
    gpus: int,
    options: dict[str, object],
    most: int,
    of: int,
    priced: list[tuple[Request, Configuration]],
) -> None:
    """`scripts/bench/search.py` has the seconds, beside those of pricing all of them."""
    request = question(model, gpu, gpus, **options)
    recommend(request)
    own = [configuration for other, configuration in priced if other is request]
    assert len(own) == len(set(own)) <= len(priced) <= most
    assert sum(len(candidate.micros) for candidate in _every_candidate(request)) == of


def test_the_closest_miss_is_the_least_pressed() -> None:
    request = question("llama-2-70b", "rtx4090", 8, strategies=("ddp",))
    candidates = [Candidate(request, layout) for layout in enumerate_candidates(request) if layout.tp * layout.pp == 1]
    nearest = closest(candidates)
    assert nearest is not None
    every = [
        candidate.priced(index).judgement.pressure for candidate in candidates for index in range(len(candidate.micros))
    ]
    assert nearest.judgement.pressure == min(every) > 1


def test_a_configuration_that_was_run_counts_with_what_it_took() -> None:
    request = question("opt-1.3b", "a100-80gb", 8, strategies=("ddp", "zero2"))
    by_name = searched(request)
    first, second = by_name["ddp"], by_name["zero2"]
    run = KnownRun(step_seconds=second.time.step_seconds / 2, each=(second.time.step_seconds / 2,), created_at="")
    experienced = replace(request, experience=Experience(known_runs={second.configuration: run}))
    answer = recommend(experienced)
    assert recommend(request).plans[0].configuration == first.configuration
    assert answer.plans[0].configuration == second.configuration
    assert answer.plans[0].time.step_seconds == run.step_seconds
