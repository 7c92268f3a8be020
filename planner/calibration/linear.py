"""Small symmetric systems, without numpy: a handful of unknowns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

Vector: TypeAlias = "tuple[float, ...]"
Matrix: TypeAlias = "tuple[Vector, ...]"


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Vector:
    """x of `matrix x = right` for a symmetric positive definite matrix, by Cholesky's decomposition."""
    lower = _cholesky(matrix)
    size = len(right)
    forward: list[float] = []
    for i in range(size):
        forward.append((right[i] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (forward[i] - sum(lower[k][i] * found[k] for k in range(i + 1, size))) / lower[i][i]
    return tuple(found)


def inverse(matrix: Sequence[Sequence[float]]) -> Matrix:
    """The inverse of a symmetric positive definite matrix."""
    size = len(matrix)
    return tuple(solve(matrix, [float(i == column) for i in range(size)]) for column in range(size))


def quadratic(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> float:
    """vᵀ M v."""
    return sum(vector[i] * row[j] * vector[j] for i, row in enumerate(matrix) for j in range(len(row)))


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    return lower
