"""Ledger: device bytes by category, added up phase by phase."""

from __future__ import annotations

from dataclasses import fields

from hardware_db.records import dataclass
from planner.models.figures import NOTHING as NOTHING
from planner.models.figures import Amount as Amount


def plus(*amounts: Amount) -> Amount:
    """Return the sum."""
    fixed = grows = 0.0
    for constant, other in amounts:
        fixed += constant
        grows += other
    return fixed, grows


def times(count: float, amount: Amount) -> Amount:
    """So many of the same."""
    return count * amount[0], count * amount[1]


def bytes_at(amount: Amount, samples: int) -> float:
    """Bytes at a number of samples."""
    return amount[0] + samples * amount[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Bytes alive at one moment on one rank, by category."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    buffers: float = 0
    temporaries: float = 0

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            activations=self.activations + other.activations,
            buffers=self.buffers + other.buffers,
            temporaries=self.temporaries + other.temporaries,
        )

    @property
    def total(self) -> float:
        """Sum of all entries."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.temporaries

    def rounded(self) -> dict[str, int]:
        """Whole bytes by category."""
        return {item.name: round(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Bytes of one rank between steps, gradients as they are when backward ends; `host` is what offload moved away.

    `elements` are the parameters this rank computes with (its tp and pp part), `local` its part of them where
    all is sharded, `stepped` those of that part that are trained, whose optimizer it runs.
    """

    parameters: float
    gradients: float
    optimizer: float
    host: float
    nvme: float
    elements: float
    local: float
    stepped: float

    @property
    def on_device(self) -> float:
        """Parameters, gradients and optimizer states together."""
        return self.parameters + self.gradients + self.optimizer
