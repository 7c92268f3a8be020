"""Which strategies can resume a checkpoint: told from its files, before anything is read from it.

The torch strategies and our own ZeRO read each other's on any number of ranks. DeepSpeed's hold flat partitions, which
fit the same number of ranks only, and stage 3 lays them out in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner import vocabulary as words
from planner.plan import Configuration
from strategies.errors import BrokenFile

LATEST = "latest"
STATE = "state.json"
_TORCH = tuple(name for name in words.STRATEGIES if name not in words.ZERO_STAGES)
_DEEPSPEED = "deepspeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Origin:
    """Who can read a checkpoint; `ranks` is None where any number of them can."""

    strategies: tuple[str, ...]
    ranks: int | None

    def suits(self, configuration: Configuration) -> bool:
        if self.ranks is None:
            return configuration.backend != _DEEPSPEED
        is_stage = configuration.backend == _DEEPSPEED and configuration.strategy in self.strategies
        return is_stage and self.ranks == configuration.world_size

    def __str__(self) -> str:
        return " or ".join(self.strategies) + ("" if self.ranks is None else f" on {_ranks(self.ranks)}")


def require_readable(directory: Path, configuration: Configuration) -> None:
    """Check that a plan's strategy and ranks can resume the latest checkpoint below `directory`, if there is one.

    Raises:
        BrokenFile: another strategy, or another number of ranks under DeepSpeed, wrote it.
    """
    latest = directory / LATEST
    if not latest.is_file():
        return
    path = directory / latest.read_text().strip()
    origin = _origin(path)
    if origin is None or origin.suits(configuration):
        return
    raise BrokenFile(
        path,
        f"{configuration.strategy} on {_ranks(configuration.world_size)} cannot resume it",
        f"resume with {origin}, which can, or name another directory",
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _origin(path: Path) -> _Origin | None:
    if (path / STATE).is_file():
        return _Origin(strategies=_TORCH, ranks=None)
    ranks = sum(1 for _ in path.glob("*zero_pp_rank_*_optim_states.pt"))
    if not ranks:
        return None
    is_stage_3 = any(path.glob("*zero_pp_rank_*_model_states.pt"))
    return _Origin(strategies=("zero3",) if is_stage_3 else ("zero1", "zero2"), ranks=ranks)
