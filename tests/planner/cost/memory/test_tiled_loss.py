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
    """Adds up the storages that are alive, those of `others` aside."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in others}

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


def counted(samples: int, head: Head, tile_tokens: int) -> tuple[float, float]:
    """Return the bytes of forward and backward of so many samples."""
    tiles = Tiles(tokens=tile_tokens, scored=1.0)
    empty = Figures(
        blocks=[], buffers=0, before=Peak(activations=NOTHING), loss=[], loss_backward=[], table_backward=[]
    )
    figures = with_tiled_loss(empty, head, tiles, (NOTHING, NOTHING))
    forward, backward = (
        max(bytes_at(peak.activations, samples) for peak in peaks) for peaks in (figures.loss, figures.loss_backward)
    )
    return forward, backward


def head_of(hidden: int, vocabulary: int, **chosen: Any) -> Head:
    """Return a head on a CPU, in fp32 unless `chosen` says otherwise."""
    usual = {"compute": 4, "weight": 4, "is_frozen": False, "is_tied": False, "on_cpu": True}
    return Head(tokens=LENGTH, hidden=hidden, vocabulary=vocabulary, **{**usual, **chosen})


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
    expected = counted(samples, head_of(hidden, vocabulary, is_frozen=is_frozen), min(TILE_TOKENS, samples * LENGTH))
    assert expected == pytest.approx((forward, backward), rel=0.03)


@pytest.mark.parametrize("mode", ["fp32", "autocast", "pure"])
@pytest.mark.parametrize("samples", [2, 6])
def test_picked_log_probabilities_take_what_is_counted(mode: str, samples: int) -> None:
    """Whole logits, made fp32 where accelerate's autocast hands them on."""
    utils = pytest.importorskip("trl.trainer.utils")
    vocabulary, dtype = 4096, torch.float32 if mode == "fp32" else torch.bfloat16
    states = torch.randn(samples, LENGTH, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (samples, LENGTH))
    with LiveBytes(states, weight, targets) as live:
        logits = states @ weight.T
        logits = logits.float() if mode == "autocast" else logits
        picked = utils.selective_log_softmax(logits, targets)
        del logits
        forward, live.peak = live.peak, live.now
        picked.sum().backward()
    head = head_of(16, vocabulary, compute=dtype.itemsize, logit=2 if mode == "pure" else 4)
    assert counted(samples, head, 0) == pytest.approx((forward, live.peak), rel=0.03)
