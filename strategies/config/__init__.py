"""The config of a script, as DeepSpeed writes it, understood without DeepSpeed.

Reading one imports much of the planner, for its limits; the values alone do not, as every rank that only measures
itself has some of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.config.values import (
    ActivationSection,
    CheckpointSection,
    CommunicationSection,
    CsvSection,
    DataSection,
    Fp16Section,
    NamedParts,
    ProfilerSection,
    ScriptConfig,
    TensorboardSection,
    ZeroSection,
)

if TYPE_CHECKING:
    from strategies.config.read import read_config, read_object

__all__ = [
    "ActivationSection",
    "CheckpointSection",
    "CommunicationSection",
    "CsvSection",
    "DataSection",
    "Fp16Section",
    "NamedParts",
    "ProfilerSection",
    "ScriptConfig",
    "TensorboardSection",
    "ZeroSection",
    "read_config",
    "read_object",
]


def __getattr__(name: str) -> object:
    if name not in ("read_config", "read_object"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from strategies.config import read

    return getattr(read, name)
