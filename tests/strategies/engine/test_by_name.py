"""Optimizers and schedulers that a config names: the same training under every strategy as in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.errors import DsplanError
from strategies.config.values import NamedParts
from strategies.engine.initialize import initialize
from strategies.optim.lion import Lion
from strategies.optim.muon import MuonWithAdamW, muon_groups
from strategies.optim.registry import optimizer_by_name
from tests.strategies import config_bodies
from tests.strategies.training_bodies import Recipe

PoolOf = Callable[..., RankPool]
FP16_FILE: dict[str, Any] = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8, "cpu_offload": False},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "wall_clock_breakdown": False,
}
WARMUP = {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3}}


def of(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def recipe_of(strategy: str) -> Recipe:
    backend, _, name = strategy.rpartition(" ")
    return Recipe(strategy=name, backend=backend, world_size=2)


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        *(
            (strategy, {**of("AdamW", lr=2e-3, betas=[0.8, 0.98]), "scheduler": WARMUP, "gradient_clipping": 0.5})
            for strategy in ("ddp", "fsdp", "zero2", "native zero1", "native zero2", "native zero3")
        ),
        *((strategy, of("Lion", lr=1e-3, weight_decay=0.1)) for strategy in ("fsdp", "zero1", "native zero3")),
        *((strategy, of("Muon", lr=1e-2, adam_lr=1e-3)) for strategy in ("ddp", "native zero1", "native zero3")),
        (
            "native zero2",
            {
                **of("SGD", lr=0.1, momentum=0.9, nesterov=True),
                "scheduler": {"type": "cosine", "params": {"total_num_steps": 5}},
            },
        ),
        ("native zero2", of("Adagrad", lr=1e-2)),
        ("zero1", of("RMSprop", lr=1e-3)),
        *(
            (strategy, {**of("plaindescent", rate=0.1), "scheduler": {"type": "Halving", "params": {"every": 2}}})
            for strategy in ("ddp", "native zero3")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["optimizer"]["type"],
)
@pytest.mark.sweep(every=3)
def test_a_config_trains_as_plain_torch_does(pool_of: PoolOf, strategy: str, config: Mapping[str, Any]) -> None:
    recipe = recipe_of(strategy)
    expected = config_bodies.plain_by_config(recipe, config)
    for ran in pool_of(strategy).run(config_bodies.train_by_config, recipe, config):
        assert ran.rates == pytest.approx(expected.rates, rel=1e-12)
        assert ran.trained.losses == pytest.approx(expected.trained.losses, rel=loss_tolerance(config))
        for name, parameter in expected.trained.parameters.items():
            off = (ran.trained.parameters[name] - parameter).norm()
            assert off <= tolerance(config) * (parameter - expected.start[name]).norm(), name


def loss_tolerance(config: Mapping[str, Any]) -> float:
    """Relative, of losses: sums round by 2^-24 each; torch's Muon makes steps in bf16, which rounds by 2^-9."""
    return 2**-10 if config["optimizer"]["type"] == "Muon" else 1e-5


def tolerance(config: Mapping[str, Any]) -> float:
    """Return how far parameters may be off, as a part of the way that they went.

    Sums over ranks round otherwise than sums over a batch, by 2^-24 each. torch's Muon turns gradients into steps in
    bf16, where such a difference may be a rounding of 2^-9, in each of its five iterations. Lion's steps have one size:
    a gradient that such a difference pushes past zero turns an element around for a step, of which one or two among
    thousands are allowed.
    """
    return {"Muon": 2**-6, "Lion": 2**-5}.get(config["optimizer"]["type"], 1e-4)


def test_lion_is_the_papers_algorithm() -> None:
    torch.manual_seed(0)
    start, rate, decay = torch.randn(7), 0.03, 0.2
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=rate, betas=(0.9, 0.99), weight_decay=decay)
    weight, momentum = start.clone(), torch.zeros(7)
    for _ in range(5):
        gradient = torch.randn(7)
        parameter.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - rate * (update + decay * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(parameter.detach(), weight)
    with pytest.raises(DsplanError, match="optimizer lion refuses its params: lr -1 and"):
        optimizer_by_name(NamedParts(name="lion", params={"lr": -1}))([parameter])


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 5))
    model.add_module("lm_head", nn.Linear(5, 5))
    marked = model[2].weight
    marked.use_muon = False
    groups = muon_groups(model, [{"params": list(model.parameters()), "weight_decay": 0.1}])
    assert [(group["use_muon"], len(group["params"])) for group in groups] == [(True, 1), (False, 6)]

    def copies(of_muon: bool) -> list[nn.Parameter]:
        return [nn.Parameter(p.detach().clone()) for g in groups if g["use_muon"] is of_muon for p in g["params"]]

    of_muon, of_adam = copies(True), copies(False)
    both = MuonWithAdamW(groups, lr=0.02, adam_lr=0.01, betas=(0.8, 0.9), momentum=0.9)
    apart = (
        torch.optim.Muon(of_muon, lr=0.02, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(of_adam, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    )
    whole = [p for group in groups for p in group["params"]]
    for _ in range(3):
        for parameter, twin in zip(whole, [*of_muon, *of_adam], strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        both.step()
        for optimizer in apart:
            optimizer.step()
        both.load_state_dict(both.state_dict())
    for parameter, twin in zip(whole, [*of_muon, *of_adam], strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamWW", {}, "optimizer AdamWW is not known; did you mean AdamW?"),
        ("pagedadamw9bit", {}, "did you mean PagedAdamW8bit?"),
        ("colour", {}, "choose one of Adadelta, Adafactor, Adagrad, Adam, Adam8bit, Adamax, AdamW, AdamW8bit,"),
        (
            "AdamW",
            {"wieght_decay": 0.1},
            "optimizer.params.wieght_decay is not known to AdamW; did you mean weight_decay?",
        ),
        ("AdamW", {"lr": -1}, "optimizer AdamW refuses its params: Invalid learning rate: -1"),
        ("AdamW", {"max_grad_norm": 1}, "max_grad_norm is not known to AdamW; use the config's gradient_clipping"),
        ("Adam", {"bias_correction": False}, "which only DeepSpeed's own Adam can do; leave it out"),
        ("Muon", {"moment": 0.9}, "optimizer.params.moment is not known to Muon; did you mean momentum?"),
        ("adamw_8bit", {}, "needs bitsandbytes; pip install bitsandbytes, or choose AdamW"),
        ("wrong-kind", {}, "optimizer wrong-kind is a int, not a Optimizer"),
    ],
)
def test_optimizers_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, name: str, params: Mapping[str, Any], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("strategies.optim.registry.OF_OPTIMIZERS._own", {"wrongkind": lambda parameters: 3})
    with pytest.raises(DsplanError) as caught:
        optimizer_by_name(NamedParts(name=name, params=params))([nn.Parameter(torch.zeros(2))])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adam_is_adamw_as_in_deepspeed_unless_it_is_told_otherwise() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]

    def build(name: str, **params: Any) -> torch.optim.Optimizer:
        return optimizer_by_name(NamedParts(name=name, params=params))(parameters)

    assert [type(build(name)) for name in ("Adam", "adamw")] == [torch.optim.AdamW] * 2
    assert type(build("Adam", adam_w_mode=False, torch_adam=True)) is torch.optim.Adam
    assert build("AdamW").defaults["weight_decay"] == 0.0
    assert build("AdamW", betas=[0.5, 0.6]).defaults["betas"] == (0.5, 0.6)


def test_optimizers_of_deepspeed_alone_are_named() -> None:
    with pytest.raises(DsplanError, match="optimizer OneBitAdam is in DeepSpeed alone; use AdamW"):
        initialize(nn.Linear(1, 1), plan=Recipe().plan(), config=of("OneBitAdam"))


def test_what_the_script_brings_comes_before_what_the_config_names() -> None:
    plan, model = Recipe().plan(), nn.Linear(1, 1)
    config = {**of("Lion"), "scheduler": {"type": "WarmupLR"}}
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    _, optimizer, _, scheduler = initialize(model, optimizer=own, plan=plan, config=config)
    assert optimizer is own
    assert type(scheduler).__name__ == "WarmupLR"
    _, optimizer, _, scheduler = initialize(
        nn.Linear(1, 1), plan=plan, config=config, lr_scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o)
    )
    assert isinstance(optimizer, Lion)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ConstantLR)


def test_an_optimizer_that_deepspeed_has_not_got_is_named(deepspeed_ranks: RankPool) -> None:
    message = deepspeed_ranks.run(config_bodies.refusal_of, recipe_of("zero1"), of("ZeroOneAdam"))[0]
    assert message.startswith("config: this DeepSpeed has no optimizer ZeroOneAdam; use AdamW, or one of its own: ")


def test_8_bit_optimizers_are_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=torch.optim.RAdam))
    optimizer = optimizer_by_name(NamedParts(name="adamw_8bit", params={"lr": 0.5}))([nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.RAdam)
    assert optimizer.defaults["lr"] == 0.5


def test_a_deepspeed_file_trains_the_same_without_deepspeed(ranks: RankPool, deepspeed_ranks: RankPool) -> None:
    def both(initial_scale_power: int, steps: int) -> list[config_bodies.ByConfig]:
        config = {**FP16_FILE, "fp16": {**FP16_FILE["fp16"], "initial_scale_power": initial_scale_power}}
        recipe = Recipe(strategy="zero2", world_size=2, accumulation=2, precision="fp16", steps=steps)
        theirs = deepspeed_ranks.run(config_bodies.train_by_config, recipe, config)[0]
        return [theirs, ranks.run(config_bodies.train_by_config, replace(recipe, backend="native"), config)[0]]

    theirs, ours = both(initial_scale_power=8, steps=6)
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-12)
    # Both round weights and gradients to 11 bits, in other orders.
    assert ours.trained.losses == pytest.approx(theirs.trained.losses, rel=2**-8)
    assert ours.trained.losses[-1] < ours.trained.losses[0]
    rising = [rate for rate in ours.rates if rate]
    # Steps that overflow do not count for the schedule; at which scale the first does not is a matter of the order of
    # sums and divisions.
    for ran in both(initial_scale_power=24, steps=14):
        assert ran.rates.count(0.0) > ours.rates.count(0.0)
        later = [rate for rate in ran.rates if rate]
        assert len(later) >= 3
        assert later[:3] == pytest.approx(rising[:3], rel=1e-12)
