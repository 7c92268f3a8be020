"""TRL's log-probabilities in tiles, tensor by tensor on a CPU, against the moments that are counted for them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.cost.memory.activations.tiled_loss import TILE_TOKENS, Head, Tiles, with_tiled_loss
from planner.cost.memory.ledger import NOTHING, bytes_at
from planner.models.figures import Figures, Peak

LENGTH = 128
OUTPUTS = ("entropy", "is_top1")
"""Beside log-probabilities, as SFT takes them."""


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive, those of `known` tensors aside."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def release() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, release)


def counted(samples: int, hidden: int, vocabulary: int, *, is_frozen: bool) -> tuple[float, float]:
    """Return the bytes of forward and backward of so many samples."""
    head = Head(
        tokens=LENGTH,
        hidden=hidden,
        vocabulary=vocabulary,
        compute=4,
        weight=4,
        is_frozen=is_frozen,
        is_tied=False,
        on_cpu=True,
    )
    tiles = Tiles(tokens=min(TILE_TOKENS, samples * LENGTH), scored=1.0)
    empty = Figures(
        blocks=[], buffers=0, before=Peak(activations=NOTHING), loss=[], loss_backward=[], table_backward=[]
    )
    figures = with_tiled_loss(empty, head, tiles, (NOTHING, NOTHING))
    forward, backward = (
        max(bytes_at(peak.activations, samples) for peak in peaks) for peaks in (figures.loss, figures.loss_backward)
    )
    return forward, backward


@pytest.mark.parametrize(
    ("samples", "hidden", "vocabulary", "is_frozen"),
    [(2, 128, 8192, False), (1, 64, 40_000, True), (33, 16, 256, False)],
)
def test_tiles_take_what_is_counted(samples: int, hidden: int, vocabulary: int, is_frozen: bool) -> None:
    kernels = pytest.importorskip("trl.kernels")
    states = torch.randn(samples, LENGTH + 1, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=not is_frozen)
    targets = torch.randint(0, vocabulary, (samples * LENGTH,))
    with LiveBytes(states, weight, targets) as live:
        output = states * 1
        before = live.now
        scored = output[:, :-1].reshape(-1, hidden)
        scored = scored.clone() if samples == 1 else scored  # one sample's is a view
        log_probabilities = kernels.ChunkedLogProbFunction.apply(
            scored, weight, None, targets, 1.0, 32_768, None, 1.0, OUTPUTS
        )
        forward, live.peak = live.peak - before, live.now
        log_probabilities[0].sum().backward()
        backward = live.peak - before
    assert counted(samples, hidden, vocabulary, is_frozen=is_frozen) == pytest.approx((forward, backward), rel=0.03)
