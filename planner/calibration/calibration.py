"""Calibration factors fitted to the runs of one kind of hardware, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from hardware_db.records import dataclass
from planner.types.cluster import Cluster, Factors

if TYPE_CHECKING:
    from hardware_db.measurement import HardwareKind
    from hardware_db.store.contract import Store


Vector: TypeAlias = "tuple[float, ...]"
Matrix: TypeAlias = "tuple[Vector, ...]"


def quadratic(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> float:
    """vᵀ M v."""
    return sum(vector[i] * row[j] * vector[j] for i, row in enumerate(matrix) for j in range(len(row)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """`factors` multiply the rates of the time model; `covariance` is that of the logarithms of the factors in `names`.

    `spread` is what the residuals of the fitted runs keep, over what is usual for plans of their kind. `rows` runs of
    `models` were fitted; on runs that were left out the median error was `error_before` with the shipped constants and
    is `error_after`, fractions of the step time.
    """

    factors: Factors
    names: tuple[str, ...]
    covariance: Matrix
    spread: float
    rows: int
    models: tuple[str, ...]
    error_before: float
    error_after: float
    created_at: str = ""

    def variance(self, gradient: Mapping[str, float]) -> float:
        """Return how uncertain a logarithm is that changes by `gradient` with the logarithm of each factor."""
        return quadratic(self.covariance, [gradient[name] for name in self.names])

    def as_document(self) -> dict[str, object]:
        """Return the JSON object that the database keeps; the time is the record's own."""
        document = asdict(self)
        del document["created_at"]
        return document

    @staticmethod
    def from_document(document: Mapping[str, Any], created_at: str) -> Calibration | None:
        """Return the calibration of a stored object, or None if it is of a release with other factors."""
        try:
            calibration = Calibration(
                factors=Factors(**document["factors"]),
                names=tuple(document["names"]),
                covariance=tuple(tuple(float(item) for item in row) for row in document["covariance"]),
                spread=float(document["spread"]),
                rows=int(document["rows"]),
                models=tuple(document["models"]),
                error_before=float(document["error_before"]),
                error_after=float(document["error_after"]),
                created_at=created_at,
            )
        except (KeyError, TypeError, ValueError):
            return None
        usable = all(0 < value < math.inf for value in asdict(calibration.factors).values())
        knows_all = set(asdict(calibration.factors)) >= set(calibration.names)
        square = len(calibration.covariance) == len(calibration.names) == len({*calibration.names})
        return calibration if usable and knows_all and square else None


def hardware_kind(cluster: Cluster) -> HardwareKind:
    """Return what a calibration of this cluster holds for; a processor goes by its model, since all are called cpu."""
    from hardware_db.measurement import HardwareKind

    device = cluster.device
    return HardwareKind(
        device=device.architecture if device.is_cpu else device.name,
        intra_link=cluster.intra_link.name if cluster.intra_link else "",
        inter_link=cluster.inter_link.name if cluster.inter_link else "",
    )


def calibration_of(store: Store, cluster: Cluster) -> Calibration | None:
    """Return the calibration in force for such a cluster, or None if there is none."""
    record = store.calibration(hardware_kind(cluster))
    return None if record is None else Calibration.from_document(record.document, record.created_at)
