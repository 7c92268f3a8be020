"""The MPI library: `from dsplan.mpi import GradientManager, ZeROOptimizer`. It needs numpy, mpi4py and an MPI library.

`docs/mpi.md` describes it.
"""

from __future__ import annotations

try:
    from strategies.mpi.checkpoints import CheckpointManager
    from strategies.mpi.gradients import GradientManager
    from strategies.mpi.parts import Part
    from strategies.mpi.performance import PerformanceMonitor, PerformanceReport
    from strategies.mpi.reduced import ReducedGradients
    from strategies.mpi.rules import SGD, AdamW
    from strategies.mpi.sizes import ModelParallelConfig, ParallelGroups
    from strategies.mpi.zero import ZeROMemory, ZeROOptimizer, ZeROStage
except ModuleNotFoundError as problem:
    if problem.name != "numpy":
        raise
    raise ImportError("dsplan.mpi needs numpy and mpi4py; pip install 'dsplan[mpi]'") from None

__all__ = [
    "SGD",
    "AdamW",
    "CheckpointManager",
    "GradientManager",
    "ModelParallelConfig",
    "ParallelGroups",
    "Part",
    "PerformanceMonitor",
    "PerformanceReport",
    "ReducedGradients",
    "ZeROMemory",
    "ZeROOptimizer",
    "ZeROStage",
]
