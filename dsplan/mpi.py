"""The MPI library: `from dsplan.mpi import GradientManager, ZeROOptimizer`. It needs numpy, mpi4py and an MPI library.

`docs/reference/mpi.md` describes it.
"""

from __future__ import annotations

try:
    from strategies.mpi.checkpoints import CheckpointManager
    from strategies.mpi.communicator import PerformanceMonitor, PerformanceReport
    from strategies.mpi.files import Part
    from strategies.mpi.gradients import GradientManager
    from strategies.mpi.recompute import ActivationCheckpoint
    from strategies.mpi.sizes import SGD, AdamW, ModelParallelConfig, ParallelGroups
    from strategies.mpi.tensor_parallel import TensorParallelism
    from strategies.mpi.trainer import ParallelTrainer
    from strategies.mpi.zero import ReducedGradients, ZeROMemory, ZeROOptimizer, ZeROStage
except ModuleNotFoundError as problem:
    if problem.name != "numpy":
        raise
    raise ImportError("dsplan.mpi needs numpy and mpi4py; pip install 'dsplan[mpi]'") from None

__all__ = [
    "SGD",
    "ActivationCheckpoint",
    "AdamW",
    "CheckpointManager",
    "GradientManager",
    "ModelParallelConfig",
    "ParallelGroups",
    "ParallelTrainer",
    "Part",
    "PerformanceMonitor",
    "PerformanceReport",
    "ReducedGradients",
    "TensorParallelism",
    "ZeROMemory",
    "ZeROOptimizer",
    "ZeROStage",
]
