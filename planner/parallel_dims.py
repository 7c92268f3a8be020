"""The degrees of parallelism of a plan, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import ContradictoryRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degrees whose product is the world size.

    `dp_replicate` ranks hold copies of the same shard, `dp_shard` ranks share one copy of the states, `tp` ranks split
    every layer, `pp` ranks split the stack of layers.

    Raises:
        ContradictoryRequest: a degree is below 1 or the product is not `world_size`.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    world_size: int

    def __post_init__(self) -> None:
        product = self.dp_replicate * self.dp_shard * self.tp * self.pp
        if min(self.dp_replicate, self.dp_shard, self.tp, self.pp) < 1 or product != self.world_size:
            raise ContradictoryRequest(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x tp {self.tp} x pp {self.pp} = {product}"
                f" is not the world size {self.world_size}"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard
