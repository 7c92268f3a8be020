"""Activation checkpointing by predicate and by plan, under every strategy: the same training, less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.errors import DsplanError
from strategies.config import limits
from strategies.config.read import read_config
from strategies.engine.initialize import initialize
from strategies.errors import CannotRun
from strategies.modules.activation_checkpointing import apply_plan, checkpoint_activations
from strategies.protocols import TrainingParts
from strategies.tracing.step import checkpointing
from strategies.tracing.step.checkpointing import recomputed_modules
from tests.strategies import activation_bodies, training_bodies
from tests.strategies.activation_bodies import Choice
from tests.strategies.training_bodies import Recipe

SPREAD = ("ddp", "fsdp", "zero1", "zero2", "zero3", "native zero1", "native zero2", "native zero3")
ENGINES = ("ddp", "fsdp", "zero3", "native zero2", "native zero3")
PoolOf = Callable[[str], RankPool]


def recipe_of(strategy: str, **how: object) -> Recipe:
    backend, _, name = strategy.rpartition(" ")
    return Recipe(**{"strategy": name, "backend": backend, "world_size": 2, **how})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "choice",
    [
        Choice(modules="blocks"),
        Choice(modules="linears", policy="selective"),
        Choice(modules="blocks", on_host=True),
        Choice(modules="the stack"),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=6, suite=lambda strategy, choice: strategy in ENGINES or choice.on_host)
def test_chosen_modules_train_as_without(strategy: str, choice: Choice, pool_of: PoolOf) -> None:
    recipe = recipe_of(strategy, steps=3)
    trained = pool_of(strategy).run(activation_bodies.train_choosing, recipe, choice)[0]
    reference = training_bodies.reference(recipe)
    assert trained.losses == pytest.approx(reference.losses, rel=1e-5)
    for name, value in trained.parameters.items():
        assert (value - reference.parameters[name]).norm() <= 1e-5 * reference.parameters[name].norm(), name


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.slow  # what is kept is traced and measured in tests/strategies/tracing/test_checkpointing.py
def test_memory_falls_as_a_trace_predicts(strategy: str, pool_of: PoolOf) -> None:
    """Forward keeps them for backward; gathered weights and the like are the same with and without checkpointing."""
    pool, recipe, none = pool_of(strategy), recipe_of(strategy), Choice()
    planned = activation_bodies.traced_keeping(none)
    before = pool.run(activation_bodies.kept_by_forward, recipe, none)[0]
    for policy in ("full", "selective"):
        choice = Choice(modules="blocks", policy=policy)
        saved = before - pool.run(activation_bodies.kept_by_forward, recipe, choice)[0]
        predicted = planned - activation_bodies.traced_keeping(choice)
        assert predicted > 0.1 * planned
        assert saved == pytest.approx(predicted, rel=0.01)


def parts_of(model: nn.Module, kind: str, config: dict[str, object] | None = None) -> TrainingParts:
    return TrainingParts(model=model, plan=Recipe(checkpointing=kind).plan(), script=read_config(config or {}))


def test_the_script_and_the_plan_cannot_both_choose() -> None:
    model = training_bodies.TinyModel()
    checkpoint_activations(model, lambda module: isinstance(module, nn.Linear))
    apply_plan(parts_of(model, "none"))
    with pytest.raises(CannotRun, match="the plan has activation checkpointing 'full' and the script chose modules"):
        apply_plan(parts_of(model, "full"))


def limited(config: dict[str, object], *, chosen: bool = False) -> dict[str, object]:
    model = training_bodies.TinyModel()
    if chosen:
        checkpoint_activations(model, lambda module: isinstance(module, nn.Linear))
    return limits.limit_activations(read_config({"activation_checkpointing": config}).activations, model)


def test_the_config_limits_the_search() -> None:
    assert limited({}) == {"checkpointings": None, "activations_on_host": False}
    assert limited({"policy": "selective"}) == {"checkpointings": ("selective",), "activations_on_host": False}
    assert limited({"cpu_checkpointing": True}) == {"checkpointings": ("full",), "activations_on_host": True}
    assert limited({}, chosen=True) == {"checkpointings": ("none",)}
    with pytest.raises(CannotRun, match="asks for 'full' and the script chose modules itself"):
        limited({"policy": "full"}, chosen=True)
    with pytest.raises(CannotRun, match="moves what a policy keeps, and the policy is 'none'"):
        limited({"policy": "none", "cpu_checkpointing": True})


def test_a_plan_of_another_policy_than_the_config_is_refused() -> None:
    with pytest.raises(CannotRun, match=r"the plan has activation checkpointing 'full' and .* asks for 'selective'"):
        initialize(
            model=training_bodies.TinyModel(),
            plan=Recipe(checkpointing="full").plan(),
            config={"activation_checkpointing": {"policy": "selective"}},
        )


@pytest.mark.parametrize("on_host", ["plan", "config"])
def test_checkpoints_of_the_plans_policy_move_to_the_host(on_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    make = checkpointing.host_room

    def host_room(tensor: torch.Tensor) -> torch.Tensor:
        rooms.append(tensor.nbytes)
        return make(tensor)

    monkeypatch.setattr(checkpointing, "host_room", host_room)
    plan = Recipe(checkpointing="full").plan()
    if on_host == "plan":
        plan = replace(plan, configuration=replace(plan.configuration, activations_on_host=True))
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        plan=plan,
        config={"activation_checkpointing": {"policy": "full", "cpu_checkpointing": on_host == "config"}},
    )
    training_bodies.one_step(engine, 0)
    assert rooms == [4 * training_bodies.GLOBAL_BATCH * training_bodies.LENGTH * training_bodies.WIDTH] * 3


def test_only_the_outermost_of_chosen_modules_recompute() -> None:
    model = activation_bodies.Stacked()
    chosen = checkpoint_activations(model, lambda module: module is not model)
    assert [type(module).__name__ for module in chosen] == ["Embedding", "Sequential", "Linear"]
    assert chosen == recomputed_modules(model)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"predicate": lambda module: False}, "the predicate chose no module of TinyModel"),
        ({"predicate": lambda module: True, "policy": "some"}, "policy 'some' is not known; use 'full' or"),
    ],
)
def test_mistakes_are_named(how: dict[str, object], words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        checkpoint_activations(training_bodies.TinyModel(), **how)  # type: ignore[arg-type]


def test_a_second_choice_is_refused() -> None:
    model = training_bodies.TinyModel()
    checkpoint_activations(model, lambda module: isinstance(module, nn.Linear))
    with pytest.raises(DsplanError, match="was called for this model before"):
        checkpoint_activations(model, lambda module: isinstance(module, nn.LayerNorm))
