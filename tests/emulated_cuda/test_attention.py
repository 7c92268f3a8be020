"""Fused attention with dropout: the backward pass drops what forward dropped, and no matrix of scores is kept."""

from __future__ import annotations

import pytest

from tests.emulated_cuda import attention_bodies
from tests.emulated_cuda.fixtures import CardPool


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.sweep(every=2)
def test_backward_drops_the_weights_that_forward_dropped(card: CardPool, dtype: str, tolerance: float) -> None:
    ((first, second, back, peak),) = card.run(attention_bodies.drop_weights, dtype)
    # The output is linear in the values, under the same dropped weights.
    assert back == pytest.approx(first, rel=tolerance, abs=1.0 if dtype == "bfloat16" else 1e-2)
    assert abs(first - second) > 1.0
    assert peak < 2 * 256 * 256 * 4
