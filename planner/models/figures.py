"""Figures: the activations of a model in numbers, of which only the samples of a micro-batch stay open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from hardware_db.records import dataclass

# Amount: bytes that are there whatever the batch, and bytes that every sample of a micro-batch adds.


Amount: TypeAlias = tuple[float, float]
NOTHING: Amount = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Memory at a moment beside weights, optimizer states and gradients that were there before."""

    activations: Amount
    cast: float = 0.0
    """Bytes of cast weights."""
    gradients: float = 0.0
    """Elements of new gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFigures:
    """One kind of block, `count` of them in a row; see `planner.cost.memory.activations.form.BlockForm`."""

    name: str
    count: int
    kept: Amount
    cast: float
    boundary: Amount
    products: Amount
    forward: Sequence[Peak]
    backward: Sequence[Peak]
    recomputed: Sequence[Peak]
    replayed: Sequence[Peak]
    buffers: float = 0.0
    unused: Amount = NOTHING
    input: Amount = NOTHING
    once: Amount = NOTHING
    handed: Amount = NOTHING
    again: Amount = NOTHING
    waiting: Amount = NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a whole model; see `planner.cost.memory.activations.form.Form`.

    `differences`: how far the form's structure is from the model's; None if no form was found. `moments` are those of a
    backward pass that was traced as a whole, with the gradients that are finished by then.
    """

    blocks: Sequence[BlockFigures]
    buffers: float
    before: Peak
    loss: Sequence[Peak]
    loss_backward: Sequence[Peak]
    table_backward: Sequence[Peak]
    differences: int | None = 0
    moments: Sequence[Peak] = ()
    scored: Amount = NOTHING
    """Bytes that a head of tiles keeps for its backward; nothing where the loss is another."""


def on_more_ranks(whole: Figures, two: Figures, tp: int) -> Figures:
    """Return the figures of one of `tp` ranks that split layers, from those of one rank and of one of two."""
    return replace(
        two,
        blocks=[_on_more(one, half, tp) for one, half in zip(whole.blocks, two.blocks, strict=True)],
        loss_backward=_scaled(two.loss_backward, 1.0, tp),
        table_backward=_scaled(two.table_backward, 1.0, tp),
    )


def share_of(whole: float, half: float, tp: int) -> float:
    """Return what `tp` ranks have each of `half` on two and `whole` on one; what one has whole, all have."""
    return max(2 * half - whole + 2 * (whole - half) / tp, 0.0)


def _on_more(whole: BlockFigures, half: BlockFigures, tp: int) -> BlockFigures:
    kept = share_of(whole.kept[1], half.kept[1], tp)
    smaller = kept / half.kept[1] if half.kept[1] else 1.0
    return replace(
        half,
        kept=(half.kept[0], kept),
        cast=half.cast * 2 / tp,
        products=(half.products[0], share_of(whole.products[1], half.products[1], tp)),
        forward=_scaled(half.forward, smaller, tp),
        backward=_scaled(half.backward, smaller, tp),
        recomputed=_scaled(half.recomputed, smaller, tp),
        replayed=_scaled(half.replayed, smaller, tp),
    )


def _scaled(peaks: Sequence[Peak], smaller: float, tp: int) -> Sequence[Peak]:
    return [
        Peak(
            activations=(peak.activations[0], smaller * peak.activations[1]),
            cast=peak.cast * 2 / tp,
            gradients=peak.gradients * 2 / tp,
        )
        for peak in peaks
    ]
