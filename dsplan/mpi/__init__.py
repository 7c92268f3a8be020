"""The MPI library: `from dsplan.mpi import GradientManager, ZeROOptimizer`. It needs numpy, mpi4py and an MPI library.

Gradients, ZeRO, timers and checkpoints for programs that mpirun starts, without torch: `docs/reference/mpi.md`.
`arrays` takes nested dicts and lists of arrays apart; `communicator` is the only module that calls MPI.
"""

from __future__ import annotations

try:
    from dsplan.mpi.checkpoints import CheckpointManager
    from dsplan.mpi.communicator import PerformanceMonitor, PerformanceReport
    from dsplan.mpi.files import Part
    from dsplan.mpi.gradients import GradientManager
    from dsplan.mpi.recompute import ActivationCheckpoint
    from dsplan.mpi.sizes import SGD, AdamW, ModelParallelConfig, ParallelGroups
    from dsplan.mpi.tensor_parallel import TensorParallelism
    from dsplan.mpi.trainer import ParallelTrainer
    from dsplan.mpi.zero import ReducedGradients, ZeROMemory, ZeROOptimizer, ZeROStage
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
