"""Training of awkward models on ranks and in one process, and what scripts do between the calls of an engine."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from strategies.engine.initialize import initialize
from tests.strategies import training_bodies
from tests.strategies.awkward_models import BATCH, CASES, WIDTH, Block, Stack
from tests.strategies.training_bodies import Recipe, Trained

STEPS = 4


def plan_of(strategy: str, accumulation: int = 1) -> Any:
    backend, _, name = strategy.rpartition(" ")
    return Recipe(strategy=name, backend=backend, world_size=2, accumulation=accumulation).plan()


def make_engine(model: Any, strategy: str, accumulation: int = 1) -> Any:
    engine, *_ = initialize(
        model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), plan=plan_of(strategy, accumulation)
    )
    return engine


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def train(strategy: str, name: str) -> Trained:
    """Losses of this rank's part of the batch, and every parameter at the end."""
    torch.manual_seed(5)
    case = CASES[name]
    engine = make_engine(case.build(), strategy)
    losses = []
    for step in range(STEPS):
        loss = case.call(engine, batch_of(step).chunk(2)[engine.environment.rank], step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Trained(losses=losses, parameters=training_bodies.whole_parameters(engine))


def reference(name: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Plain torch, rank by rank: each rank's losses, and every parameter at the end."""
    torch.manual_seed(5)
    case = CASES[name]
    model = case.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        for rank, part in enumerate(batch_of(step).chunk(2)):
            loss = case.call(model, part, step)
            (loss / 2).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def _stack() -> Stack:
    torch.manual_seed(5)
    return Stack(nn.ModuleList([Block() for _ in range(3)]))


def _part(engine: Any, step: int) -> torch.Tensor:
    return batch_of(step).chunk(2)[engine.environment.rank]


def _steps(engine: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Train plainly, whatever came before; every parameter."""
    for step in range(steps):
        engine.backward(engine(_part(engine, step)))
        engine.step()
    return training_bodies.whole_parameters(engine)


def undisturbed(strategy: str) -> dict[str, torch.Tensor]:
    """Return what a run ends with in which nothing unusual happens."""
    return _steps(make_engine(_stack(), strategy))


def disturbed(strategy: str, how: str) -> dict[str, torch.Tensor]:
    """Return what a run ends with between whose steps something happens that must change nothing."""
    engine = make_engine(_stack(), strategy)
    for step in range(STEPS):
        DISTURBANCES[how](engine, _part(engine, step))
        engine.backward(engine(_part(engine, step)))
        engine.step()
    DISTURBANCES[how](engine, _part(engine, 0))
    return training_bodies.whole_parameters(engine)


def _evaluates(engine: Any, x: torch.Tensor) -> None:
    engine.eval()
    with torch.no_grad():
        first = engine(x)
    with torch.inference_mode():
        again = engine(x)
    engine.train()
    assert torch.equal(first, again)
    assert first.isfinite()


def _fails_in_a_block(engine: Any, x: torch.Tensor) -> None:
    def fail(module: nn.Module, inputs: Any) -> None:
        raise RuntimeError("meant to fail")

    hook = engine.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="meant to fail"):
        engine(x)
    hook.remove()


def _throws_a_loss_away(engine: Any, x: torch.Tensor) -> None:
    engine(x)


def _clears_gradients(engine: Any, x: torch.Tensor) -> None:
    engine.optimizer.zero_grad()
    engine.module.zero_grad()


def _copies_the_model(engine: Any, x: torch.Tensor) -> None:
    """As moving averages of weights do; the copy is a module of its own that computes the same."""
    with engine.whole_parameters():
        copy = deepcopy(engine.module)
        expected = engine.module(x)
    if engine.is_main:  # no other rank is asked for anything
        output = copy(x)
        assert torch.allclose(output, expected, rtol=1e-6)
        output.backward()
        assert all(parameter.grad is not None for parameter in copy.parameters())


def _looks_at_shapes(engine: Any, x: torch.Tensor) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    assert shapes == {name: tuple(parameter.shape) for name, parameter in _stack().named_parameters()}
    assert set(engine.module.state_dict()) == set(_stack().state_dict())


DISTURBANCES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "evaluation": _evaluates,
    "an exception in forward": _fails_in_a_block,
    "a loss that is thrown away": _throws_a_loss_away,
    "gradients cleared": _clears_gradients,
    "a copy of the model": _copies_the_model,
    "a look at the shapes": _looks_at_shapes,
}


def evaluate_between_micro_batches(strategy: str) -> dict[str, torch.Tensor]:
    engine = make_engine(_stack(), strategy, accumulation=2)
    for step in range(STEPS):
        for micro in _part(engine, step).chunk(2):
            _evaluates(engine, micro)
            loss = engine(micro)
            with torch.no_grad():
                assert engine(micro) == loss, "in training mode, between forward and backward"
            engine.backward(loss)
            engine.step()
            _evaluates(engine, micro)
    return training_bodies.whole_parameters(engine)


def several_backward_calls(strategy: str) -> dict[str, torch.Tensor]:
    """Two halves of the batch, each with a forward and a backward of its own, before one `step`."""
    engine = make_engine(_stack(), strategy)
    for step in range(STEPS):
        for half in _part(engine, step).chunk(2):
            engine.backward(engine(half) / 2)
        engine.step()
    return training_bodies.whole_parameters(engine)


def freeze_and_thaw(strategy: str) -> dict[str, torch.Tensor]:
    """A block that is frozen after `initialize` for two steps."""
    engine = make_engine(_stack(), strategy)
    _steps(engine, 1)
    engine.module.blocks[1].requires_grad_(False)
    _steps(engine, 2)
    engine.module.blocks[1].requires_grad_(True)
    return _steps(engine, 1)


def reference_freeze_and_thaw() -> dict[str, torch.Tensor]:
    model = _stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, frozen in ((0, False), (0, True), (1, True), (0, False)):
        model.blocks[1].requires_grad_(not frozen)
        model(batch_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def two_engines(strategy: str) -> dict[str, torch.Tensor]:
    """A generator that learns through a discriminator, which learns too: two engines, one backward through both."""
    torch.manual_seed(5)
    maker, judge = make_engine(_stack().blocks[0], strategy), make_engine(_stack(), strategy)
    for step in range(STEPS):
        x = _part(maker, step)
        judge.backward(judge(maker(x).detach()) - judge(x))
        judge.step()
        maker.backward(judge(maker(x)))
        maker.step()
        judge.module.zero_grad()
    parameters = training_bodies.whole_parameters(judge)
    return {**parameters, **{f"maker.{name}": p for name, p in training_bodies.whole_parameters(maker).items()}}


def reference_two_engines() -> dict[str, torch.Tensor]:
    maker, judge = _stack().blocks[0], _stack()
    steps = {model: torch.optim.AdamW(model.parameters(), lr=0.01) for model in (maker, judge)}
    for step in range(STEPS):
        for model in (judge, maker):
            for part in batch_of(step).chunk(2):
                loss = judge(maker(part).detach()) - judge(part) if model is judge else judge(maker(part))
                (loss / 2).backward()
            steps[model].step()
            maker.zero_grad()
            judge.zero_grad()
    parameters = {name: parameter.detach() for name, parameter in judge.named_parameters()}
    return {**parameters, **{f"maker.{name}": p.detach() for name, p in maker.named_parameters()}}
