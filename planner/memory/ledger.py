"""Ledger: device bytes by category, added up phase by phase; Transients: what a strategy adds to each phase."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.temporaries

    def rounded(self) -> dict[str, int]:
        """Whole bytes by category."""
        return {item.name: round(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Transients:
    """Bytes on one rank that a strategy holds besides states and activations.

    `resident` buffers live through the whole step, `forward` and `backward` in that pass only. `cast` are the 16-bit
    copies of fp32 weights that autocast keeps until their backward, `accumulated` what unsynchronised accumulation
    adds to the gradients, `step` the optimizer's temporaries.
    """

    resident: float = 0
    forward: float = 0
    backward: float = 0
    cast: float = 0
    cast_in_backward: float = 0
    accumulated: float = 0
    step: float = 0
