"""A trace on fake tensors against a real step of the same module, storage by storage."""

from __future__ import annotations

import pytest
import torch

from hardware_db.probe import probe
from planner.cluster.resolve import probed_cluster
from strategies.tracing.module_trace import trace_activations
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies.tracing.trace_bodies import LENGTH, WIDTH, Model

BATCH = 6
CPU = probed_cluster(probe(), ranks=1).device


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    labels = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"signal": torch.randn(samples, 3, LENGTH), "labels": labels}


def real_step(model: Model) -> tuple[int, int, int]:
    """Bytes beside parameters and inputs: kept after forward, at forward's peak, at backward's peak without
    gradients."""
    batch = batch_of(BATCH)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    with StorageTracker([*model.parameters(), *batch.values()]) as tracker:
        at_rest = tracker.live_bytes
        loss = model(**batch)
        kept, forward = tracker.live_bytes - at_rest, tracker.peak_bytes - at_rest
        tracker.restart_peak()
        loss.backward()
        return kept, forward, tracker.peak_bytes - at_rest


def test_a_trace_finds_what_a_real_step_uses() -> None:
    model = Model()
    traced = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    kept, forward, backward = real_step(model)
    # What does not grow with the batch (the loss, one gradient on its way) is not part of a trace.
    fixed = 2 * max(weight.nbytes for weight in model.parameters())
    assert BATCH * traced.kept == pytest.approx(kept, rel=0.01)
    assert BATCH * traced.forward == pytest.approx(forward, rel=0.01)
    assert BATCH * traced.backward == pytest.approx(backward, rel=0.01, abs=fixed)


def test_blocks_are_read_one_by_one() -> None:
    model = Model()
    traced = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    boundary = LENGTH * WIDTH * 4
    statistics = 2 * LENGTH * 4
    # Norm's output, the two tensors around GELU, the statistics, and the output; the input was there before.
    assert traced.block == boundary + 8 * boundary + boundary + statistics
    assert traced.boundary == boundary
    assert traced.products == 5 * boundary


def test_sixteen_bits_halve_what_is_kept_and_autocast_keeps_more() -> None:
    model = Model()
    full = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    narrow = trace_activations(model, batch_of, "bf16", CPU)
    assert narrow["pure"].block == pytest.approx(full.block / 2, rel=0.02)
    assert narrow["pure"].kept < narrow["autocast"].kept < full.kept


def test_the_module_is_left_as_it_was() -> None:
    model = Model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trace_activations(model, batch_of, "bf16", CPU)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
