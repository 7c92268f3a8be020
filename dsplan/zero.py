"""`from dsplan.zero import ZeroOptimizer`: the base of a script's own optimizers that ZeRO can shard."""

from strategies.optim.optimizers import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
