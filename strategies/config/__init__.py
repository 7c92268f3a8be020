"""The config of a script, as DeepSpeed writes it, understood without DeepSpeed."""

from strategies.config.read import read_config, read_object
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
