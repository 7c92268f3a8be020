"""The promises of `import dsplan`."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import dsplan


def test_public_names() -> None:
    assert dsplan.__all__ == [
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
    assert dir(dsplan) == sorted(dsplan.__all__)


@pytest.mark.parametrize("name", dsplan.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(dsplan, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'strategy'"):
        dsplan.strategy  # noqa: B018


def test_importing_dsplan_imports_nothing_else() -> None:
    code = "import sys, dsplan; print(sorted({name.split('.')[0] for name in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'dsplan'" in out.stdout
    assert not {"torch", "rich", "typer", "planner", "strategies"} & set(ast.literal_eval(out.stdout))
