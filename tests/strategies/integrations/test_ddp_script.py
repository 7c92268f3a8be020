"""A hand-written loop around DDP under strategies that shard: the results are DDP's, and the loop stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.integrations import ddp_script_bodies as bodies
from tests.strategies.integrations.ddp_script_bodies import Loop

SHARDING = ("fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
FP32 = 1e-5
"""Relative: the order of sums over ranks and micro-batches is all that differs from DDP, over six steps."""
HOW: dict[str, dict[str, Any]] = {
    "optimizer made first": {"optimizer_first": True},
    "no_sync": {"accumulation": 3},
    "no_sync, kept": {"accumulation": 3, "keeps_no_sync": True, "kind": "sgd", "clipping": 0.3},
    "nanoGPT's flag, clipped": {"accumulation": 2, "accumulates_by": "flag", "clipping": 0.5},
    "reduced each time, scheduled": {"accumulation": 2, "accumulates_by": "sum", "scheduler": True, "clears": "model"},
    "scaled": {"scaler": True, "clipping": 0.5, "optimizer_first": True, "clears": "raw_model"},
    "scaler off": {"scaler": False, "clears": "zeros"},
    "cleared one by one": {"accumulation": 2, "clears": "loop"},
}


SUITE = ("nanoGPT's flag, clipped", "reduced each time, scheduled")


@pytest.mark.parametrize("how", [how if how in SUITE else pytest.param(how, marks=pytest.mark.slow) for how in HOW])
@pytest.mark.sweep(every=2)
def test_losses_weights_and_states_are_those_of_ddp(how: str, ranks: RankPool) -> None:
    expected = ranks.run(bodies.train, Loop(**HOW[how]))
    for strategy in SHARDING:
        for got, reference in zip(ranks.run(bodies.train, Loop(strategy=strategy, **HOW[how])), expected, strict=True):
            assert got["losses"] == pytest.approx(reference["losses"], rel=FP32), strategy
            assert got["norms"] == pytest.approx(reference["norms"], rel=FP32), strategy
            assert got["evaluated"] == pytest.approx(reference["evaluated"], rel=FP32), strategy
            assert (got["names"], got["rates"]) == (reference["names"], reference["rates"]), strategy
            _assert_close(got["state"], reference["state"], strategy)
            # What shares a storage is tied to what writes safetensors, and left out.
            assert not strategy.startswith("zero") or got["parts"] == []
            assert got["optimizer"].keys() == reference["optimizer"].keys(), strategy
            for index, values in reference["optimizer"].items():
                _assert_close(got["optimizer"][index], values, strategy)


def _assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], strategy: str) -> None:
    assert got.keys() == expected.keys(), strategy
    for name, value in expected.items():
        assert got[name].shape == value.shape, (strategy, name)
        assert (got[name].float() - value.float()).norm() <= FP32 * value.float().norm(), (strategy, name)


@pytest.mark.parametrize(("strategy", "weights"), [("fsdp", 0.5), ("zero1", 1.0), ("zero2", 1.0), ("zero3", 0.0)])
def test_a_rank_holds_its_part(strategy: str, weights: float, ranks: RankPool) -> None:
    for held in ranks.run(bodies.is_sharded, strategy):
        assert held["weights"] == pytest.approx(weights, abs=0.05)  # under zero3 the parts are no parameter's storage
        assert held["states"] == pytest.approx(0.5, abs=0.05)
        assert held["is_ddp"]


@pytest.mark.parametrize("loads_after", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
@pytest.mark.sweep(every=6)
def test_a_script_resumes_from_what_it_saved(strategy: str, loads_after: bool, ranks: RankPool) -> None:
    unbroken, resumed = ranks.run(bodies.resume, strategy, loads_after)[0]
    assert resumed == pytest.approx(unbroken, rel=FP32)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(strategy: str, ranks: RankPool) -> None:
    assert ranks.run(bodies.overflow, strategy) == [(2.0**8, 2.0**7, True)] * 2


@pytest.mark.parametrize(
    ("strategy", "body"),
    [
        ("fsdp", bodies.answered),
        ("zero2", bodies.answered),
        ("zero3", bodies.answered),
        ("fsdp", bodies.compiled),
        ("zero2", bodies.compiled),
    ],
)
@pytest.mark.sweep(every=2)
def test_dataclasses_and_compiled_models_train_alike(strategy: str, body: Any, ranks: RankPool) -> None:
    assert ranks.run(body, strategy)[0] == pytest.approx(ranks.run(body, "ddp")[0], rel=FP32)


@pytest.mark.parametrize(
    ("strategy", "what", "line"),
    [
        ("zero2", "process_group", "strategy 'zero2' shards over all ranks, and DDP is given a process_group; use ddp"),
        ("fsdp", "comm_hook", "strategy 'fsdp' reduces gradients itself and takes no hook of DDP's; use ddp"),
        ("zero3", "closure", "optimizer LBFGS computes the loss again in a closure"),
        ("zero3", "compile", "strategy 'zero3' frees weights between uses, which a compiled model does not allow"),
        ("fsdp", "closure", "optimizer LBFGS computes the loss again in a closure"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(strategy: str, what: str, line: str, ranks: RankPool) -> None:
    for message in ranks.run(bodies.refusal, strategy, what):
        assert message.startswith(line)
