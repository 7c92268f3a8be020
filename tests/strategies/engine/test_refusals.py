"""Refusals of the engine: one line that says what, where, and what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from hardware_db.errors import DsplanError
from planner.search.request import Degrees
from planner.types.plan import Plan
from planner.types.plan_io import save_plan
from strategies.autoplan.live import PlanningOptions, live_request
from strategies.config.read import read_config
from strategies.data.loader import ShardedLoader
from strategies.distributed.environment import Environment
from strategies.engine.initialize import initialize
from strategies.engine.registry import STRATEGIES, find_strategy
from strategies.errors import CannotRun
from strategies.run_directory.request import PlanRequest
from strategies.variables import REQUEST
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe, TinyModel

ALONE = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def refusal(action: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(DsplanError) as caught:
        action(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def with_configuration(plan: Plan, **changes: object) -> Plan:
    return replace(plan, configuration=replace(plan.configuration, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "zero1", "backend": "deepspeed", "tp": 2, "micro_batch_size": 12}, "hands whole models"),
        (
            {"pp": 4, "micro_batch_size": 12, "pp_schedule": "zero-bubble", "strategy": "fsdp"},
            "under ddp, zero1 and zero2 without",
        ),
        ({"strategy": "zero2", "backend": "native", "offload": "all"}, "possible: optimizer, nvme"),
        ({"strategy": "zero2", "backend": "deepspeed", "offload": "nvme"}, "possible: optimizer"),
        ({"strategy": "zero2", "backend": "torch"}, "use deepspeed or native"),
        ({"strategy": "ddp", "backend": "native"}, "use torch"),
        ({"strategy": "ddp", "backend": "deepspeed"}, "use torch"),
        ({"offload": "optimizer"}, "possible: none"),
        ({"strategy": "fsdp", "optimizer": "adafactor"}, "needs whole matrices"),
    ],
)
def test_plans_that_cannot_run(changes: dict[str, object], words: str) -> None:
    configuration = with_configuration(Recipe().plan(), **changes).configuration
    assert words in refusal(find_strategy, configuration, ALONE)


def test_the_registry_names_every_strategy() -> None:
    assert sorted(STRATEGIES) == ["ddp", "fsdp", "fsdp-grad-op", "hsdp", "single", "zero1", "zero2", "zero3"]


def test_a_plan_for_another_number_of_ranks() -> None:
    plan = Recipe(strategy="ddp", world_size=2).plan()
    assert "is for 2 ranks and this job has 1" in refusal(initialize, TinyModel(), plan=plan)


def test_a_plan_of_another_global_batch_or_strategy() -> None:
    plan = Recipe().plan()
    message = refusal(initialize, TinyModel(), plan=plan, config={"train_batch_size": 24})
    assert "plan again with --global-batch 24" in message
    assert "strategy='ddp' was asked for" in refusal(initialize, TinyModel(), plan=plan, strategy="ddp")


def test_degrees_that_are_none() -> None:
    refuse = partial(refusal, initialize, TinyModel())
    assert "parallel: tp is 0" in refuse(parallel={"tp": 0})
    assert "choose from shard, tp, pp, cp, ep" in refuse(parallel={"dp": 2})
    assert "one of gpipe, 1f1b" in refuse(parallel={"pp": 1, "pp_schedule": "zigzag"})
    assert "must be True or False" in refuse(parallel={"tp": 1, "sequence_parallel": 1})
    assert "schedule gpipe is for a pipeline" in refuse(parallel={"pp_schedule": "gpipe"})


def test_a_plan_of_other_degrees_than_the_script_asks_for() -> None:
    assert "has tp 1 and tp 2 was asked for" in refusal(
        initialize, TinyModel(), plan=Recipe().plan(), parallel={"tp": 2}
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "deepspeed", "parallel": Degrees(tp=2)}, "hands whole models to DeepSpeed, and tp 2 splits them"),
        ({"strategy": "hsdp", "parallel": Degrees(tp=2)}, "hsdp is fsdp unless there are several nodes"),
        ({"strategy": "hsdp"}, "'hsdp' is fsdp unless there are .*; give shard, or choose fsdp, or leave the strategy"),
        ({"strategy": "zero2", "parallel": Degrees(shard=3)}, "shard 3 .* does not divide the 4 ranks of this job"),
        (
            {"strategy": "zero3", "backend": "deepspeed", "parallel": Degrees(shard=2)},
            "DeepSpeed 0.19 shards zero3 over all ranks, and shard 2 is for 2 copies; use backend native",
        ),
        ({"parallel": Degrees(ep=2)}, "ep 2 spreads experts over ranks, and TinyModel has none; use ep 1"),
    ],
)
def test_what_is_asked_of_four_ranks_and_cannot_be_planned(settings: dict[str, Any], words: str) -> None:
    options = PlanningOptions(config=read_config({"train_batch_size": 8}), **settings)
    four = replace(ALONE, world_size=4, local_world_size=4)
    with pytest.raises(CannotRun, match=words):
        live_request(TinyModel(), options, four, ())


def test_an_unreadable_plan_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(Recipe().plan(), path)
    path.write_text(path.read_text().replace("schema_version: 1", "schema_version: 99"))
    monkeypatch.setenv(REQUEST, PlanRequest(plan_file=str(path)).to_variables()[REQUEST])
    assert str(path) in refusal(initialize, TinyModel())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"train_batch_size": "many"}, "train_batch_size is 'many'"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"bf16": "on"}, "bf16 is 'on'; it must be an object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enable one"),
        ({"zero_optimization": {"stage": 5}}, "stage is 5"),
    ],
)
def test_configs_with_wrong_values(config: dict[str, Any], words: str) -> None:
    assert words in refusal(read_config, config)


def test_a_config_whose_batch_contradicts_itself() -> None:
    config = read_config(
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    )
    assert "2 x gradient_accumulation_steps 2 x 2 ranks = 8" in refusal(config.global_batch_size, 2)


def test_keys_that_only_deepspeed_reads_are_named() -> None:
    config = {"train_batch_size": 12, "wandb": {"enabled": True}, "zero_optimization": {"zero_quantized_weights": True}}
    message = refusal(initialize, TinyModel(), plan=Recipe().plan(), config=config)
    assert "cannot do what wandb, zero_optimization.zero_quantized_weights asks" in message


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    assert str(path) in refusal(read_config, path)
    path.write_text("{")
    assert "is not JSON" in refusal(read_config, path)
    path.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    assert "has the key 'enabled' twice" in refusal(read_config, path)
    path.write_text("[]")
    assert "does not hold a JSON object" in refusal(read_config, path)
    path.write_text(json.dumps({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "fp16": {}}))
    config = read_config(str(path))
    assert (config.train_batch_size, config.global_batch_size(4), config.precision) == (None, 8, None)


def test_zero_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    message = refusal(initialize, TinyModel(), plan=Recipe(strategy="zero2").plan())
    assert "pip install dsplan[deepspeed]" in message
    assert "backend 'native'" in message


def test_optimizers_that_no_library_here_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "pip install bitsandbytes" in refusal(initialize, TinyModel(), plan=Recipe(optimizer="adamw-8bit").plan())


def test_a_model_with_nothing_to_train() -> None:
    assert "unfreeze" in refusal(initialize, TinyModel().requires_grad_(False), plan=Recipe().plan())


def test_optimizers_of_other_models_and_used_ones() -> None:
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert "not the model's" in refusal(initialize, TinyModel(), optimizer=stranger, plan=Recipe().plan())


def test_checkpointing_a_model_without_blocks() -> None:
    plan = Recipe(checkpointing="full").plan()
    assert "put the blocks in a ModuleList" in refusal(initialize, nn.Linear(4, 4), plan=plan)


def test_data_that_cannot_be_shared_out() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    configuration = Recipe().plan().configuration
    assert "IterableDataset" in refusal(ShardedLoader, Stream(), configuration, ALONE)
    assert "lower train_batch_size" in refusal(ShardedLoader, TensorDataset(torch.zeros(5)), configuration, ALONE)


def test_client_state_must_be_json(tmp_path: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    assert "must be JSON" in refusal(engine.save_checkpoint, tmp_path, client_state={"model": nn.Linear(1, 1)})
    assert list(tmp_path.iterdir()) == []


def test_environment_variables_that_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    assert "LOCAL_RANK is 'first'" in refusal(initialize, TinyModel(), plan=Recipe().plan())


def test_a_config_that_is_neither_a_dictionary_nor_a_path() -> None:
    assert "config is 5; it must be a dictionary or the path of a JSON file" in refusal(read_config, 5)
