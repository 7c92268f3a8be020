"""Amount: bytes that are there whatever the batch, and bytes that every sample of a micro-batch adds."""

from __future__ import annotations

from typing import TypeAlias

Amount: TypeAlias = tuple[float, float]
NOTHING: Amount = (0.0, 0.0)


def plus(*amounts: Amount) -> Amount:
    """The sum."""
    fixed = grows = 0.0
    for one, other in amounts:
        fixed += one
        grows += other
    return fixed, grows


def times(count: float, amount: Amount) -> Amount:
    """So many of the same."""
    return count * amount[0], count * amount[1]


def bytes_at(amount: Amount, samples: int) -> float:
    """Bytes at a number of samples."""
    return amount[0] + samples * amount[1]
