"""dsplan: on these GPUs, how do I train this model fastest without running out of memory?

Everything public is a name of this package; each is imported when it is first used, so that planning needs no torch.
"""

from __future__ import annotations

# typing is slow to import, and an interrupt meanwhile would end the `dsplan` command in a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsplan.api import estimate, plan, recommend
    from dsplan.selector import HardwareSelector
    from dsplan.trainer import DistributedTrainer, setup_distributed_training
    from planner.errors import DsplanError
    from strategies.checkpoint.export import export_checkpoint
    from strategies.data.loader import DistributedDataLoader
    from strategies.distributed.environment import init_distributed
    from strategies.engine.checkpoint_manager import CheckpointManager
    from strategies.engine.initialize import initialize
    from strategies.engine.telemetry import MemoryProfiler
    from strategies.modules.activation_checkpointing import checkpoint_activations
    from strategies.modules.kernels import register_kernel
    from strategies.optim.optimizers import ZeroOptimizer
    from strategies.optim.registry import register_optimizer, register_scheduler
    from strategies.parallel.empty import empty_weights
    from strategies.telemetry.training_monitor import TrainingMonitor

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "DistributedDataLoader",
    "DistributedTrainer",
    "DsplanError",
    "HardwareSelector",
    "MemoryProfiler",
    "TrainingMonitor",
    "ZeroOptimizer",
    "__version__",
    "checkpoint_activations",
    "empty_weights",
    "estimate",
    "export_checkpoint",
    "init_distributed",
    "initialize",
    "plan",
    "recommend",
    "register_kernel",
    "register_optimizer",
    "register_scheduler",
    "setup_distributed_training",
]

_HOMES = {
    "CheckpointManager": "strategies.engine.checkpoint_manager",
    "DistributedDataLoader": "strategies.data.loader",
    "DistributedTrainer": "dsplan.trainer",
    "DsplanError": "hardware_db.errors",
    "HardwareSelector": "dsplan.selector",
    "MemoryProfiler": "strategies.engine.telemetry",
    "TrainingMonitor": "strategies.telemetry.training_monitor",
    "ZeroOptimizer": "strategies.optim.optimizers",
    "checkpoint_activations": "strategies.modules.activation_checkpointing",
    "empty_weights": "strategies.parallel.empty",
    "estimate": "dsplan.api",
    "export_checkpoint": "strategies.checkpoint.export",
    "init_distributed": "strategies.distributed.environment",
    "initialize": "strategies.engine.initialize",
    "plan": "dsplan.api",
    "recommend": "dsplan.api",
    "register_kernel": "strategies.modules.kernels",
    "register_optimizer": "strategies.optim.registry",
    "register_scheduler": "strategies.optim.registry",
    "setup_distributed_training": "dsplan.trainer",
}

_ROOMS = ("checkpointing", "integrations", "parallel", "profiling", "zero")
"""Modules that scripts reach as attributes, without an import of their own."""


def __getattr__(name: str) -> object:
    if name not in _HOMES and name not in _ROOMS:
        raise AttributeError(f"module 'dsplan' has no attribute {name!r}")
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"dsplan.{name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
