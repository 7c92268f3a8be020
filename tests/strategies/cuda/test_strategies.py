"""Every strategy trains on cards to the CPU's losses; `pytest --cards` runs all other tests of ranks there too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.emulated_cuda.fixtures import CardPool
from tests.strategies import training_bodies
from tests.strategies.cuda import strategy_bodies
from tests.strategies.parallel_bodies import Composition
from tests.strategies.training_bodies import Recipe

_TORCH = ("ddp", "fsdp", "fsdp-grad-op")
_NATIVE = ("zero1", "zero2", "zero3")
_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 3, "clipping": 0.5},
    "reduced once": {"accumulation": 3, "sync_each": False},
    "own groups and frozen weights": {"own_optimizer": True, "frozen": True},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
    "optimizer on the host": {"offload": "optimizer", "accumulation": 3, "clipping": 0.5},
    "all on the host": {"offload": "all", "accumulation": 3},
    "states on a disk": {"offload": "nvme", "accumulation": 3},
}
_HAVE: dict[str, tuple[str, ...]] = {"optimizer": _NATIVE, "all": ("fsdp", "fsdp-grad-op", "zero3"), "nvme": _NATIVE}
_CASES = [
    (strategy, variant)
    for strategy, (variant, how) in product((*_TORCH, *_NATIVE), _VARIANTS.items())
    if strategy in _HAVE.get(how.get("offload", ""), (*_TORCH, *_NATIVE))
]
_IN_SUITE = {
    ("ddp", "accumulation"),
    ("fsdp", "all on the host"),
    ("zero2", "optimizer on the host"),
    ("zero3", "all on the host"),
    ("zero3", "states on a disk"),
}


@pytest.mark.parametrize(("strategy", "variant"), _CASES)
@pytest.mark.sweep(every=2, suite={"ddp-accumulation", "fsdp-all on the host", "zero3-states on a disk"})
def test_losses_are_those_of_the_cpu(
    strategy: str, variant: str, two_cards: CardPool, ranks: RankPool, tmp_path: Path
) -> None:
    backend = "native" if strategy in _NATIVE else "torch"
    recipe = Recipe(strategy=strategy, backend=backend, world_size=2, **_VARIANTS[variant])
    arguments = (recipe, str(tmp_path))
    _assert_same(two_cards.run(strategy_bodies.losses, *arguments), ranks.run(strategy_bodies.losses, *arguments))


@pytest.mark.slow  # DeepSpeed's optimizer for the host is compiled, once
def test_deepspeed_steps_on_the_host_with_an_optimizer_of_its_own(
    cuda_environment: Mapping[str, str], one_rank: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    recipe = Recipe(strategy="zero2", backend="deepspeed", world_size=2, offload="optimizer")
    alone = one_rank.run(training_bodies.train_with_planned_optimizer, Recipe())[0]
    with CardPool(2, cuda_environment) as pool:  # DeepSpeed leaves state behind
        for optimizer, losses in pool.run(training_bodies.train_with_planned_optimizer, recipe):
            assert optimizer == "DeepSpeedZeroOptimizer", "it has made the one for the CPU"
            assert losses == pytest.approx(alone[1], rel=1e-6)


@pytest.mark.slow  # DeepSpeed changes torch's linear layers, in processes of its own
def test_deepspeed_partitions_a_model_over_cards(
    cuda_environment: Mapping[str, str], one_rank: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    recipe = Recipe(strategy="zero3", backend="deepspeed", world_size=2)
    [(_, expected)] = one_rank.run(strategy_bodies.losses, Recipe(), str(tmp_path))
    with CardPool(2, cuda_environment) as pool:
        for device, losses in pool.run(strategy_bodies.losses, recipe, str(tmp_path)):
            assert device == "cuda"
            assert losses == pytest.approx(expected, rel=1e-6)


_SPLITS = {
    "tp": Composition(tp=2),
    "tp and sequence parallelism": Composition(tp=2, sequence_parallel=True, checkpointing="selective"),
    "pp": Composition(pp=2, accumulation=2),
    "pp gpipe": Composition(pp=2, accumulation=4, schedule="gpipe"),
    "pp interleaved": Composition(pp=2, accumulation=4, schedule="interleaved", virtual_stages=2),
    "pp zero-bubble": Composition(pp=2, accumulation=4, schedule="zero-bubble"),
    "cp": Composition(strategy="fsdp", cp=2),
    "ep": Composition(strategy="fsdp", dp_shard=2, ep=2),
    "zero1 pp": Composition(strategy="zero1", pp=2, accumulation=2, clipping=0.5),
    "zero2 tp": Composition(strategy="zero2", tp=2),
    "fsdp tp": Composition(strategy="fsdp", tp=2, accumulation=2, clipping=0.5),
}


@pytest.mark.parametrize("split", _SPLITS)
@pytest.mark.sweep(every=2, suite=lambda split: split in ("tp and sequence parallelism", "pp"))
def test_split_models_have_the_losses_of_the_cpu(split: str, two_cards: CardPool, ranks: RankPool) -> None:
    composition = replace(_SPLITS[split], steps=3)
    arguments = ("mixtral" if composition.ep > 1 else "gpt", composition)
    on_cards = two_cards.run(strategy_bodies.losses_of_split_model, *arguments)
    _assert_same(on_cards, ranks.run(strategy_bodies.losses_of_split_model, *arguments))


def _assert_same(on_cards: list[tuple[str, list[float]]], on_cpu: list[tuple[str, list[float]]]) -> None:
    for (device, losses), (usual, expected) in zip(on_cards, on_cpu, strict=True):
        assert (device, usual) == ("cuda", "cpu")
        assert losses == pytest.approx(expected, rel=1e-6)
        assert len({*losses}) == len(losses), "nothing is learned"
