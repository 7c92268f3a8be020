"""Log-probabilities of preferences: the memory of head and loss, in TRL's tiles or picked out of whole logits.

`trl.kernels.ChunkedLogProbFunction` (TRL 1.16) multiplies 4,096 scored tokens with 32,768 rows of the head at a time
and folds each tile into what a log-softmax needs. Backward makes every tile again, turns it into its gradient in place,
and adds up the gradients of hidden states and head in fp32. On a GPU a Triton kernel folds the tile as it is; on a CPU
torch makes copies of it, 13 bytes an element forward and 29 backward. Tensors measured one by one on a CPU
(`tests/planner/cost/memory/test_tiled_loss.py`) are these to the byte, but for vectors of the tokens.

Before 1.0 TRL picked them out of whole logits, sequence by sequence (`selective_log_softmax` of `trl/trainer/utils.py`,
as ms-swift and LLaMA-Factory still have it), which the same test measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hardware_db.records import dataclass
from planner.cost.memory.ledger import Amount
from planner.models.figures import Figures, Peak
from planner.types.job import Job
from planner.vocabulary import REFERRING

TILE_TOKENS = 4096
"""`TOKEN_CHUNK_SIZE` of `trl/kernels/chunked_logprob.py`."""
TILE_WORDS = 32_768
"""`_CHUNKED_LOGPROB_CHUNK_SIZE` of `trl/trainer/utils.py`; the tile is as wide whatever the vocabulary."""
FOLDED_ON_CPU = (13, 29)
"""Bytes per element of a tile that torch makes beside it, forward and backward: fp32 copies, and masks of a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The tiles of one job: tokens of the largest, and the share of a sample's tokens that is scored."""

    tokens: int
    """0 where all logits are made at once, and log-probabilities picked out of them."""
    scored: float


def tiles_of(job: Job) -> Tiles | None:
    """Return the tiles that a micro-batch is scored in; None where its loss is another.

    Triton's form scores the tokens with a label alone, those of completions; torch's all. Preferences under plain
    losses are those of TRL before 1.0.
    """
    post, work = job.workload.post, job.workload
    share = 1.0 if post is None or job.cluster.device.is_cpu else post.scored_share
    if work.loss == "plain" and work.task in REFERRING and work.code == "transformers":
        return Tiles(tokens=0, scored=share)
    if work.loss != "tiled":
        return None
    scored = job.tokens_per_micro_batch * share
    return Tiles(tokens=min(TILE_TOKENS, max(1, round(scored))), scored=share)


PICKED_IN_32 = (4, 16)
"""Bytes per logit in fp32, forward and backward: the logits; beside them gradients by sequence, all of them stacked,
and those of the picked words. Autocast's output is made fp32 first, of two bytes more."""
PICKED_IN_16 = 4
"""The same in 16 bits: logits, and log-probabilities that are kept; backward gradients of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The head that tokens are multiplied with, in elements and in bytes of an element."""

    tokens: float
    """Scored tokens of a sample."""
    hidden: float
    vocabulary: float
    compute: int
    weight: int
    is_frozen: bool
    is_tied: bool
    """It is the token table, so that autograd keeps its gradient until the table's own is there."""
    on_cpu: bool
    logit: int = 4
    """Bytes of a logit as losses of whole ones see it: accelerate makes those of autocast fp32."""


def with_tiled_loss(figures: Figures, head: Head, tiles: Tiles, beside: tuple[Amount, Amount]) -> Figures:
    """Return the figures with another head and loss; `beside` is what is there around them, forward and backward."""
    if not tiles.tokens:
        return _with_picked_loss(figures, head, beside)
    tile = float(TILE_WORDS * tiles.tokens * head.compute)
    narrow = tiles.tokens * min(head.vocabulary, TILE_WORDS) if head.on_cpu else 0.0
    copied = head.compute * head.tokens * head.hidden  # scored hidden states, one after the other
    cast = 2.0 * TILE_WORDS * head.hidden * head.compute if head.compute < head.weight else 0.0
    scored = beside[0][0], beside[0][1] + copied
    # Forward casts a slice of the head within one product, backward has the one before it as well.
    forward = (scored[0] + tile + FOLDED_ON_CPU[0] * narrow + cast / 2, scored[1])
    return replace(
        figures,
        scored=scored,
        loss=[Peak(activations=forward)],
        loss_backward=[
            *_backward(head, tile, (beside[1][0] + FOLDED_ON_CPU[1] * narrow + cast, beside[1][1] + copied)),
            *(peak for peak in figures.loss_backward),
        ],
    )


def _with_picked_loss(figures: Figures, head: Head, beside: tuple[Amount, Amount]) -> Figures:
    """Return the figures with log-probabilities that are picked out of whole logits."""
    logits = head.tokens * head.vocabulary
    forward, backward = (PICKED_IN_16, PICKED_IN_16)
    if head.logit == 4:
        forward, backward = PICKED_IN_32[0] + (head.compute if head.compute < 4 else 0), PICKED_IN_32[1]
    return replace(
        figures,
        loss=[Peak(activations=(beside[0][0], beside[0][1] + forward * logits))],
        loss_backward=[
            Peak(activations=(beside[1][0], beside[1][1] + backward * logits)),
            *figures.loss_backward,
        ],
    )


def _backward(head: Head, tile: float, around: Amount) -> Iterator[Peak]:
    """Yield the moment of the last tile, and that of gradients handed over in the dtype of their tensors."""
    summed = 4 * head.tokens * head.hidden
    table = 0.0 if head.is_frozen else head.hidden * head.vocabulary
    fixed, grows = around
    yield Peak(activations=(fixed + tile + 4 * table, grows + summed))
    if head.weight == 4 or head.is_frozen:
        return
    handed = head.weight * table if head.is_tied else 0.0
    yield Peak(
        activations=(fixed + tile + 4 * table + handed, grows + summed + head.weight * head.tokens * head.hidden),
        gradients=0.0 if head.is_tied else table,
    )
