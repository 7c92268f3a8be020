"""ReducedGradients: what `ZeROOptimizer.reduce_gradients` leaves on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strategies.mpi.arrays import Array
from strategies.mpi.tree import Path, name_of


class ReducedGradients(Mapping[str, Array]):
    """Averaged gradients by name (`blocks/0/weight`): whole in stage 1, this rank's run, flat, in stages 2 and 3.

    `+` joins the gradients of other layers and adds those of another micro-batch; `scaled` divides them by how many
    there were. They are fp32, or fp64 where the parameter is.
    """

    def __init__(self, parts: Mapping[Path, Array], *, divided: bool) -> None:
        self.parts, self.divided = dict(parts), divided
        self._paths = {name_of(path): path for path in self.parts}

    @property
    def bytes(self) -> int:
        """What they take on this rank."""
        return sum(part.nbytes for part in self.parts.values())

    def scaled(self, factor: float) -> ReducedGradients:
        """The same, times a factor."""
        return ReducedGradients({path: part * factor for path, part in self.parts.items()}, divided=self.divided)

    def __add__(self, other: ReducedGradients) -> ReducedGradients:
        both = self.parts | other.parts
        for path in self.parts.keys() & other.parts.keys():
            both[path] = self.parts[path] + other.parts[path]
        return ReducedGradients(both, divided=self.divided)

    def __getitem__(self, name: str) -> Array:
        return self.parts[self._paths[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self.parts)
