"""The phases of `initialize`, each by itself: configure, adapt, plan, split, build, supervise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from planner.types.plan import Plan
from strategies.autoplan.select import PlanningOptions
from strategies.config.read import read_config
from strategies.distributed.environment import Environment
from strategies.engine import initialize as phases
from strategies.engine.base import Engine
from strategies.engine.telemetry import Telemetry, live_engine
from strategies.errors import CannotRun
from strategies.modules.adapters import TrainingMethod
from strategies.protocols import Observer, TrainingParts
from strategies.telemetry.tensorboard_log import StepLog
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe, TinyModel

ALONE = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def options_of(plan: Plan | None = None, **config: Any) -> PlanningOptions:
    return PlanningOptions(config=read_config(config), plan=plan)


def adapted_of(plan: Plan | None = None, **config: Any) -> phases.Adapted:
    return phases.Adapted(method=TrainingMethod(), options=options_of(plan, **config), model_parameters=None)


def engine_of(**config: Any) -> Engine:
    model, plan = TinyModel(), Recipe().plan()
    strategy = phases.split(model, plan, options_of(plan), ALONE, {})
    return phases.build(strategy, TrainingParts(model=model, plan=plan, script=read_config(config)))


@pytest.mark.parametrize("kind", [phases.Configured, phases.Adapted, phases.Planned])
def test_what_phases_hand_on_is_frozen(kind: type[Any]) -> None:
    value = kind(**dict.fromkeys(item.name for item in fields(kind)))
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(kind)[0].name, 1)


# Configure.


def test_a_config_comes_as_second_argument_by_name_or_from_the_command_line() -> None:
    config = {"train_batch_size": 12}
    args = SimpleNamespace(deepspeed_config=config)
    for configured in (
        phases.configure(TinyModel(), config, None),
        phases.configure(TinyModel(), None, config),
        phases.configure(TinyModel(), None, None, args=args),
    ):
        assert configured.script.global_batch_size(1) == 12
        assert configured.optimizer is None
        assert configured.environment.world_size == 1
        assert configured.degrees is None
    for second, args_given in ((config, None), (None, args)):
        with pytest.raises(CannotRun, match="leave one out"):
            phases.configure(TinyModel(), second, config, args=args_given)


def test_a_mistake_in_the_config_is_found_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "join", lambda: pytest.fail("the ranks met"))
    with pytest.raises(CannotRun, match="model is a list"):
        phases.configure([], None, None)
    with pytest.raises(CannotRun, match="train_batch_sise"):
        phases.configure(TinyModel(), None, {"train_batch_sise": 12})


def test_stages_of_a_config_are_degrees_of_the_plan() -> None:
    config = {"pipeline": {"stages": 2}}
    degrees = phases.configure(TinyModel(), None, config, parallel={"tp": 2}).degrees
    assert degrees is not None
    assert (degrees.pp, degrees.tp) == (2, 2)
    with pytest.raises(CannotRun, match=r"pipeline\.stages is 2 and parallel= has pp 4"):
        phases.configure(TinyModel(), None, config, parallel={"pp": 4})


# Adapt.


def test_of_the_parameters_that_the_script_names_those_stay_that_are_not_frozen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = TinyModel()
    adapted = phases.adapt(
        model, options_of(train_only="positions|norm"), ALONE, (model.positions, model.embedding.weight)
    )
    assert adapted.model_parameters is not None
    assert list(map(id, adapted.model_parameters)) == [id(model.positions)]
    assert not model.embedding.weight.requires_grad
    assert adapted.method.train_only == "positions|norm"
    assert "are trained" in capsys.readouterr().out


def test_parameters_that_can_be_walked_once_are_kept() -> None:
    model = TinyModel()
    adapted = phases.adapt(model, options_of(), ALONE, model.parameters())
    assert adapted.model_parameters == list(model.parameters())
    assert adapted.method.is_full


def test_an_optimizer_that_holds_weights_which_are_frozen_is_refused() -> None:
    model = TinyModel()
    options = replace(options_of(train_only="."), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CannotRun, match="the optimizer was made before weights were frozen"):
        phases.adapt(model, options, ALONE)


# Plan.


@pytest.fixture
def effects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The side effects of `choose_plan` in their order, none of which happens."""
    names: list[str] = []

    def record(name: str) -> Any:
        return lambda *_, **__: names.append(name)

    monkeypatch.setattr(phases.claim, "take_over", record("claim"))
    monkeypatch.setattr(phases, "_prepare_tuning", record("tuning"))
    monkeypatch.setattr(phases, "_announce", record("announce"))
    return names


def test_a_plan_is_checked_before_the_run_is_claimed_and_claimed_before_it_is_announced(effects: list[str]) -> None:
    plan = Recipe().plan()
    planned = phases.choose_plan(TinyModel(), adapted_of(plan), ALONE)
    assert planned.plan == plan
    assert effects == ["claim", "tuning", "announce"]


@pytest.mark.parametrize(
    ("adapted", "has_to_split", "words"),
    [
        (adapted_of(Recipe().plan()), True, "the plan has no pipeline"),
        (adapted_of(Recipe(strategy="ddp", world_size=2).plan()), False, "is for 2 ranks and this job has 1"),
    ],
)
def test_a_plan_that_is_refused_claims_nothing(
    adapted: phases.Adapted, has_to_split: bool, words: str, effects: list[str]
) -> None:
    with pytest.raises(CannotRun, match=words):
        phases.choose_plan(TinyModel(), adapted, ALONE, has_to_split=has_to_split)
    assert effects == []


def test_the_plan_says_what_is_trained(effects: list[str]) -> None:
    adapted = replace(adapted_of(Recipe().plan()), method=TrainingMethod(train_only="head"))
    assert phases.choose_plan(TinyModel(), adapted, ALONE).plan.workload["train_only"] == "head"


# Split.


def test_a_plan_for_one_rank_leaves_the_model_whole() -> None:
    model, plan = TinyModel(), Recipe().plan()
    before = dict(model.named_parameters())
    strategy = phases.split(model, plan, options_of(plan), ALONE, {})
    assert strategy.configuration is plan.configuration
    assert strategy.mesh.is_data_parallel
    assert dict(model.named_parameters()) == before


def test_a_plan_that_no_strategy_runs_is_refused() -> None:
    plan = Recipe().plan()
    other = replace(plan, configuration=replace(plan.configuration, offload="optimizer"))
    with pytest.raises(CannotRun, match="possible: none"):
        phases.split(TinyModel(), other, options_of(other), ALONE, {})


# Build.


def test_an_engine_is_built_with_what_the_config_names_and_a_loader() -> None:
    model, plan = TinyModel(), Recipe().plan()
    script = read_config(
        {"optimizer": {"type": "SGD", "params": {"lr": 0.25}}, "checkpoint": {"directory": "kept", "keep_last": 3}}
    )
    strategy = phases.split(model, plan, options_of(plan), ALONE, {})
    engine = phases.build(strategy, TrainingParts(model=model, plan=plan, script=script), training_bodies.Samples())
    assert isinstance(engine.optimizer, torch.optim.SGD)
    assert engine.get_lr() == [0.25]
    assert engine.checkpointing.keep_last == 3
    assert engine.dataloader is not None
    assert engine.observers == [], "nothing watches before the last phase"


# Supervise.


class _Tuning:
    """Stands for a `Prospect`."""

    def watch(self, engine: Engine) -> None:
        engine.observers.append(_Named("tuner"))


class _Named(Observer):
    def __init__(self, name: str) -> None:
        self.name = name

    def training_starts(self, steps: Any) -> None:
        """As a RunMonitor is told."""
        assert steps() == 0


def test_observers_come_in_the_order_that_the_end_of_a_step_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    monkeypatch.setattr(phases.supervision, "supervise", lambda engine: engine.observers.append(_Named("supervision")))
    planned = phases.Planned(plan=engine.plan, tuning=cast("Any", _Tuning()), monitor=cast("Any", _Named("monitor")))
    phases.supervise(engine, read_config({"steps_per_print": 5}), planned)
    names = [getattr(observer, "name", type(observer).__name__) for observer in engine.observers]
    assert names == ["monitor", StepLog.__name__, "supervision", "tuner"]
    engine.close()


# What an engine reports.


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_engine_that_the_script_gives_up_is_gone_at_once(collector_off: None) -> None:
    engine = engine_of()
    assert live_engine() is engine
    weights = weakref.ref(next(engine.module.parameters()))
    del engine
    assert live_engine() is None
    assert weights() is None


def test_telemetry_passes_each_event_on_to_all_observers() -> None:
    events: list[str] = []

    class Noting(Observer):
        def loss_is(self, loss: torch.Tensor) -> None:
            events.append("loss")

        def starts(self, section: str) -> None:
            events.append(section)

        def step_ended(self) -> None:
            events.append("ended")

        def close(self) -> None:
            events.append("closed")

    engine = engine_of()
    assert isinstance(engine.telemetry, Telemetry)
    assert engine.observers is engine.telemetry.observers
    engine.observers.extend((Noting(), Noting()))
    engine.backward(engine(*training_bodies.batch_of(0)))
    engine.step()
    engine.close()
    assert events == [name for name in ("forward", "loss", "backward", "step", "ended", "closed") for _ in range(2)]


def test_counted_bytes_are_the_reports() -> None:
    engine = engine_of()
    engine.counted_peak_bytes = 7
    assert engine.telemetry.counted_peak_bytes == 7
    assert engine.memory_report().peak_bytes == engine.telemetry.memory_report().peak_bytes == 7
