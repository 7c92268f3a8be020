"""`initialize` without a plan: planned from the live module and this machine, within what the script asks for.

The machine's rates are stored beforehand, so that no test waits for them to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.errors import DsplanError
from planner import vocabulary as words
from planner.types.plan_io import plan_from_dict
from strategies.engine.initialize import initialize
from strategies.errors import BackendMissing
from strategies.optim.optimizers import OPTIMIZERS
from strategies.telemetry.metrics import read_metrics
from tests.strategies import config_bodies, training_bodies
from tests.strategies.example_bodies import losses_of, run_example
from tests.strategies.training_bodies import Recipe, TinyModel

STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
PoolOf = Callable[[str], RankPool]


def test_a_module_is_planned_printed_and_trained(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _, loader, _ = initialize(
        model=TinyModel(), training_data=training_bodies.Samples(), config={"train_batch_size": 12}
    )
    printed = capsys.readouterr().out.splitlines()
    assert engine.configuration.strategy == "single"
    assert engine.configuration.global_batch_size == 12
    assert engine.configuration.sequence_length == training_bodies.LENGTH
    assert len(printed) == 3
    assert printed[0].startswith("dsplan: single (torch) on 1 x ")
    assert loader is not None
    ids, targets = next(iter(loader))
    assert ids.shape == (engine.configuration.micro_batch_size, training_bodies.LENGTH)
    engine.backward(engine(ids, targets))
    engine.step()


@pytest.mark.parametrize(("shape", "positions"), [((8,), 1), ((5, 8), 5)])
def test_a_sample_of_features_is_as_long_as_it_has_rows(shape: tuple[int, ...], positions: int) -> None:
    samples = [(torch.randn(shape), torch.tensor(0)) for _ in range(12)]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    engine, *_ = initialize(model=model, training_data=cast("Any", samples), config={"train_batch_size": 12})
    assert engine.configuration.sequence_length == positions


def test_a_plan_with_muon_steps_inner_matrices_by_it_and_the_rest_by_adamw() -> None:
    plan = Recipe().plan()
    model = TinyModel()
    _, optimizer, *_ = initialize(
        model=model, plan=replace(plan, configuration=replace(plan.configuration, optimizer="muon"))
    )
    members = {group["use_muon"]: group["params"] for group in optimizer.param_groups}
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    assert all(weight.ndim == 2 and weight not in tables for weight in members[True])
    assert sum(map(len, members.values())) == len(list(model.parameters()))


def test_every_optimizer_of_a_plan_can_be_made_or_names_what_to_install() -> None:
    assert set(words.OPTIMIZERS) == {*OPTIMIZERS, "muon"}
    for name, library in (("adamw-4bit", "torchao"), ("adamw-8bit-paged", "bitsandbytes")):
        if find_spec(library) is None:
            with pytest.raises(BackendMissing, match=f"pip install {library}"):
                OPTIMIZERS[name]([nn.Parameter(torch.zeros(2))])


def test_a_plan_of_another_model_or_device_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Recipe().plan()
    initialize(model=TinyModel(), plan=plan)
    assert capsys.readouterr().err == ""
    initialize(model=TinyModel(), plan=replace(plan, model={**plan.model, "parameters": 124_000_000}))
    assert "the plan is for tiny with 124,000,000 parameters and this model has" in capsys.readouterr().err
    initialize(model=TinyModel(), plan=replace(plan, cluster={"device": "A100-SXM4-80GB", "vendor": "nvidia"}))
    assert "the plan is for A100-SXM4-80GB and its ranks are on a CPU" in capsys.readouterr().err


def test_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_QUIET", "1")
    initialize(model=TinyModel(), config={"train_batch_size": 12})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, (3, 4, 12, "fp32")),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, (6, 2, 12, "fp32")),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}, (5, 2, 10, "fp32")),
        ({"train_micro_batch_size_per_gpu": 5, "bf16": {"enabled": True}}, (5, 1, 5, "bf16")),
        ({"train_batch_size": 7, "zero_optimization": {"stage": 0}}, (7, 1, 7, "fp32")),
    ],
)
def test_the_config_decides_what_it_says(config: dict[str, Any], expected: tuple[int, int, int, str]) -> None:
    engine, *_ = initialize(model=TinyModel(), config=config)
    chosen = engine.configuration
    decided = (chosen.micro_batch_size, chosen.gradient_accumulation_steps, chosen.global_batch_size, chosen.precision)
    assert decided == expected


@pytest.mark.parametrize(("strategy", "stage"), [("single", 0), (None, 0), ("single", None)])
def test_a_strategy_and_a_stage_that_agree_run(strategy: Any, stage: int | None) -> None:
    engine, *_ = initialize(model=TinyModel(), strategy=strategy, config={"zero_optimization": {"stage": stage}})
    assert engine.configuration.strategy == "single"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "fdsp"}, "unknown strategy 'fdsp'; nearest: fsdp"),
        ({"backend": "native"}, "backend 'native' needs several ranks"),
        ({"backend": "native", "strategy": "ddp"}, "backend 'native' does not run strategy 'ddp'"),
        ({"backend": "torch", "strategy": "zero2"}, "backend 'torch' does not run strategy 'zero2'"),
        ({"strategy": "ddp"}, "strategy 'ddp' needs more than one GPU; start more ranks"),
        ({"strategy": "zero2"}, "strategy 'zero2' needs several ranks"),
        ({"config": {"train_batch_size": 7, "gradient_accumulation_steps": 2}}, "is not a multiple of"),
        ({"strategy": "fsdp", "config": {"zero_stage": 2}}, "config's zero_optimization.stage is 2; leave out one"),
        ({"strategy": "zero3", "config": {"zero_stage": 2}}, "strategy='zero3' was asked for"),
        ({"strategy": "zero1", "config": {"zero_stage": 0}}, "zero_optimization.stage is 0; leave out one"),
        (
            {"config": {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}},
            "optimizer.params.lr is '1e-3', a text; write the number 0.001",
        ),
        (
            {"config": {"optimizer": {"type": "Adam", "params": {"betas": [0.9, ".99"]}}}},
            "optimizer.params.betas is .*, a text; write the number 0.99",
        ),
        (
            {"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}},
            "scheduler.params.warmup_num_steps is '10', a text",
        ),
        (
            {"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/no/disk"}}}},
            "/no/disk",
        ),
    ],
)
def test_wishes_that_cannot_be_planned(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DsplanError, match=words) as caught:
        initialize(model=TinyModel(), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (None, "native"),
        ("native", "native"),
        ("deepspeed", "lacks AVX512-FP16; use backend native, whose ZeRO shards the same, or precision fp32 or bf16"),
    ],
)
@pytest.mark.sweep(every=2)
def test_zero_in_fp16_runs_where_deepspeed_has_none(backend: str | None, expected: str, ranks: RankPool) -> None:
    config = {"train_batch_size": 12, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    for message in ranks.run(config_bodies.planned_on_avx2, config, backend):
        assert message.endswith(expected)
        assert "\n" not in message


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_ranks_ask_deepspeed_for_the_precision_of_a_given_plan(precision: str, deepspeed_ranks: RankPool) -> None:
    recipe = Recipe(strategy="zero1", world_size=2)
    assert (
        deepspeed_ranks.run(config_bodies.refusal_on_a_device_without, precision, recipe)
        == [f"DeepSpeed has no {precision} on this machine's cpu; use backend 'native' or another precision"] * 2
    )


ARGUMENTS = ["--steps", "4", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence-length", "32"]


@pytest.fixture(scope="session")
def example_losses() -> dict[str, list[float]]:
    """The losses of the first strategy that ran; the others must equal them."""
    return {}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sweep(every=2, suite=lambda strategy: strategy in ("fsdp", "zero2"))
def test_the_example_has_the_same_losses_under_every_strategy(
    strategy: str, pool_of: PoolOf, tmp_path: Path, dsplan_home: Path, example_losses: dict[str, list[float]]
) -> None:
    environment = {"DSPLAN_STRATEGY": strategy, "DSPLAN_RUN_DIR": str(tmp_path), "DSPLAN_HOME": str(dsplan_home)}
    pool_of(strategy).run(run_example, "train_gpt", environment, ARGUMENTS)
    plan = read_metrics(tmp_path, 1)[0][0]
    assert plan.pop("event") == "plan"
    assert plan_from_dict(plan).configuration.strategy == strategy
    losses = losses_of(tmp_path)
    assert losses == pytest.approx(example_losses.setdefault("first", losses), rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
