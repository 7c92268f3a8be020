"""The table of what does not go together: a plan that breaks one line of it, and the sentence that everybody says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner import vocabulary as words
from planner.cost import combinations
from planner.cost.combinations import Adapted, why_contradictory, why_refused
from planner.errors import ContradictoryRequest
from planner.search.estimate import why_impossible
from planner.search.exact import ExactOptions, exact
from planner.search.space import configuration_of, enumerate_candidates, micro_batches
from planner.types.plan import Configuration
from strategies.distributed.environment import Environment
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from tests.planner.search.questions import question

_TRAINED: dict[str, Any] = {
    "strategy": "fsdp",
    "backend": "torch",
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 6,
    "sequence_length": 1024,
    "precision": "bf16",
    "optimizer": "adamw",
}
_ZERO2 = {"strategy": "zero2", "backend": "native"}

_UNEVEN = {"micro_batches": "1x2,1x1", "micro_batch_size": 2, "global_batch_size": 3, "gradient_accumulation_steps": 1}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("strategy single uses one GPU, not 2", {"strategy": "single", "tp": 2}),
    ("backend native does not run fsdp; use torch", {"backend": "native"}),
    ("offload nvme is not possible with fsdp of backend torch; possible: all", {"offload": "nvme"}),
    ("an offload ratio (0.5)", {"offload": "all", "offload_ratio": 0.5}),
    ("gradient compression int8 is for ddp", {"gradient_compression": "int8"}),
    ("backend native has no fp8 products", {**_ZERO2, "precision": "fp8"}),
    ("Adafactor needs whole matrices, which fsdp shards", {"optimizer": "adafactor"}),
    ("which DeepSpeed's zero2 cuts", {**_ZERO2, "backend": "deepspeed", "optimizer": "muon"}),
    ("no form that steps in host memory; leave offload all", {"optimizer": "muon", "offload": "all"}),
    ("DeepSpeed has no zero2 in a pipeline (pp 2)", {**_ZERO2, "backend": "deepspeed", "pp": 2}),
    ("schedule gpipe is for a pipeline", {"pp_schedule": "gpipe"}),
    ("virtual stages (2) are for a pipeline", {"virtual_stages": 2}),
    (
        "virtual stages (2) are for schedule interleaved, not gpipe",
        {"pp": 2, "pp_schedule": "gpipe", "virtual_stages": 2},
    ),
    ("needs virtual stages of at least 2", {"pp": 2, "pp_schedule": "interleaved"}),
    (
        "rounds of pp 4 micro-batches, and 6 are no whole rounds; use gradient accumulation 8",
        {"pp": 4, "pp_schedule": "interleaved", "virtual_stages": 2},
    ),
    ("cp 2 needs fused attention", {"cp": 2, "attention": "eager"}),
    ("cp 2 cuts samples into 4 parts", {"cp": 2, "sequence_length": 1022}),
    ("give tp of at least 2", {"sequence_parallel": True}),
    ("cuts 510 tokens over tp 4", {"cp": 2, "tp": 4, "sequence_parallel": True, "sequence_length": 1020}),
    ("ep 2 with tp 2 needs sequence parallelism", {"ep": 2, "tp": 2}),
    ("dsplan run has no fp8 products", {"precision": "fp8"}),
    ("hands whole models to DeepSpeed, and tp 2 splits them", {"strategy": "zero1", "backend": "deepspeed", "tp": 2}),
    (
        "DeepSpeed 0.19 shards zero2 over all ranks, and shard 2 is for 2 copies",
        {**_ZERO2, "backend": "deepspeed", "dp_shard": 2, "dp_replicate": 2},
    ),
    (
        "ZeRO++ (hpz 2, weights in 8 bits) is DeepSpeed's",
        {**_ZERO2, "hpz_partition_size": 2, "quantized_weights": True},
    ),
    (
        "hpz 3 does not divide the 4 ranks that share the weights",
        {"strategy": "zero3", "backend": "deepspeed", "dp_shard": 4, "hpz_partition_size": 3},
    ),
    ("zero3 of backend native cuts whole layers, and pp 2 splits them", {**_ZERO2, "strategy": "zero3", "pp": 2}),
    ("Adafactor needs whole matrices, which tp 2 splits", {**_ZERO2, "optimizer": "adafactor", "tp": 2}),
    (
        "splits backward passes, as zero-bubble does, under ddp, zero1 and zero2 without activation checkpointing",
        {"pp": 2, "pp_schedule": "zero-bubble"},
    ),
    (
        "equal rounds of at least pp 4 micro-batches, and 11 are none; use gradient accumulation 12",
        {"strategy": "ddp", "pp": 4, "pp_schedule": "zero-bubble", "gradient_accumulation_steps": 11},
    ),
    ("Muon makes whole matrices orthogonal, which tp 2 splits", {"optimizer": "muon", "tp": 2}),
    ("DeepSpeed gives every rank as many samples", {**_UNEVEN, **_ZERO2, "backend": "deepspeed", "dp_shard": 2}),
    ("pp 2 mixes or lines up the samples of ranks", {**_UNEVEN, "strategy": "ddp", "dp_replicate": 2, "pp": 2}),
)


def configured(changes: dict[str, Any]) -> Configuration:
    chosen = {**_TRAINED, **changes}
    readers = chosen.get("dp_replicate", 1) * chosen.get("dp_shard", 1)
    steps = chosen["gradient_accumulation_steps"] * readers
    return Configuration(**{"global_batch_size": steps * chosen["micro_batch_size"], **chosen})


@pytest.mark.parametrize(("sentence", "changes"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_every_line_of_the_table_is_said_where_it_is_broken(sentence: str, changes: dict[str, Any]) -> None:
    assert sentence in str(why_refused(configured(changes)))


def test_the_cases_break_every_line() -> None:
    """A line that no case of this table breaks first is one that nobody has seen."""
    table = (*combinations._CONTRADICTIONS, *combinations._NOT_HERE)
    first = {next(rule for rule in table if rule.breaks(plan)) for plan in (configured(each) for _, each in CASES)}
    assert first == set(table)


def test_what_is_refused_as_a_contradiction_is_said_alike_by_the_estimate_and_the_engine() -> None:
    request, plan = exact(question("gpt2", "a100-40gb", 2), ExactOptions(strategy="fsdp", offload="nvme"))
    reason = why_impossible(request, plan)
    assert reason == why_contradictory(plan)
    environment = Environment(rank=0, local_rank=0, world_size=2, local_world_size=2, device=torch.device("cpu"))
    with pytest.raises(CannotRun) as caught:
        find_strategy(plan, environment)
    assert str(caught.value) == f"the plan: {reason}"


_PRODUCT: dict[str, tuple[Any, ...]] = {
    "strategy": words.STRATEGIES,
    "backend": words.BACKENDS,
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    **dict.fromkeys(words.DEGREES, (1, 2)),
    "sequence_parallel": (False, True),
    "pp_schedule": words.SCHEDULES,
    "virtual_stages": (1, 2),
    "gradient_accumulation_steps": (1, 4),
    "precision": words.PRECISIONS,
    "optimizer": words.OPTIMIZERS,
    "activation_checkpointing": words.CHECKPOINTINGS,
    "offload": words.OFFLOADS,
    "gradient_compression": words.COMPRESSIONS,
}


def _drawn(count: int) -> Iterator[Configuration]:
    """Configurations from the whole product. In half of them what is left out is as usual, or one in a thousand would
    be runnable."""
    chance, usual = random.Random(16), configured({})
    while count:
        rare = chance.choice((1.0, 0.25))
        drawn = {
            name: chance.choice(values) if rare == 1 or chance.random() < rare else getattr(usual, name)
            for name, values in _PRODUCT.items()
        }
        with suppress(ContradictoryRequest):  # experts over more ranks than share them
            yield configured(drawn)
            count -= 1


def _engine_says(plan: Configuration) -> str:
    """Return why the engine refuses a configuration; empty where it makes its strategy of it."""
    ranks = plan.world_size
    ranks_of = {"rank": 0, "local_rank": 0, "world_size": ranks, "local_world_size": ranks}
    try:
        opened = find_strategy(plan, Environment(**ranks_of, device=torch.device("cpu")))
    except CannotRun as problem:
        return str(problem)
    assert opened.configuration is plan
    return ""


def test_the_engine_opens_what_the_table_lets_through_and_says_its_sentence_of_the_rest() -> None:
    opened = set[str]()
    for plan in _drawn(3000):
        reason = why_refused(plan)
        if reason or plan.backend != "deepspeed":  # which may not be installed
            assert _engine_says(plan) == (f"the plan: {reason}" if reason else ""), plan
        if not reason:
            opened.add(plan.strategy)
    assert opened == set(words.STRATEGIES)


@pytest.mark.parametrize(
    ("adapted", "changes", "sentence"),
    [
        (
            Adapted(method="dora"),
            {"tp": 2},
            "splits LoRA's adapters and no other kind; use method lora, or tp 1",
        ),
        (Adapted(method="qlora"), {"tp": 2}, "(tp 2) splits no weights in 4 bits; use method lora, or tp 1"),
        (Adapted(method="lora", load_dtype="nf4"), {"tp": 2}, "splits no weights in 4 bits"),
        (Adapted(method="qlora"), {**_ZERO2, "backend": "deepspeed"}, "DeepSpeed's zero2 casts weights, which 4-bit"),
        (
            Adapted(method="qlora", load_dtype="int8"),
            {},
            "loads no frozen weights in int8; use bf16, or nf4",
        ),
        (Adapted(method="qlora", load_dtype="bf16"), {"tp": 2}, ""),
        (Adapted(method="lora"), {"tp": 2}, ""),
        (Adapted(method="dora"), {"pp": 2}, ""),
        (Adapted(method="lora"), {"offload": "nvme"}, "offload nvme is not possible with fsdp"),
    ],
)
def test_adapters_are_refused_where_they_are_not_split(
    adapted: Adapted, changes: dict[str, Any], sentence: str
) -> None:
    reason = why_refused(configured(changes), adapted)
    assert sentence in (reason or "")
    assert bool(reason) is bool(sentence)


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora"])
def test_what_is_recommended_is_opened(method: words.Method) -> None:
    request = replace(question("meta-llama/Llama-3.1-8B", "a100-40gb", 8), splits=words.DEGREES)
    request = replace(request, workload=replace(request.workload, method=method))
    layouts = list(enumerate_candidates(request))
    assert any(layout.tp > 1 for layout in layouts) is (method in ("full", "lora"))
    for layout in layouts:
        for micro_batch in micro_batches(request, layout):
            plan = configuration_of(request, layout, micro_batch)
            assert why_refused(plan, Adapted(method=method)) is None


def test_what_goes_together() -> None:
    offloaded = {**_ZERO2, "offload": "optimizer", "offload_ratio": 0.5}
    for changes in ({}, {"offload": "all"}, offloaded, {**offloaded, "pp": 2}, {"offload": "all", "pp": 2}):
        assert why_refused(configured(changes)) is None
