"""Parts for other training libraries, each imported when it is first used.

`TrainerCallback` goes into a HF Trainer, `LightningStrategy` into Lightning's Trainer, `FabricStrategy` into Fabric.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from strategies.integrations.fabric import FabricStrategy
    from strategies.integrations.huggingface import TrainerCallback
    from strategies.integrations.lightning import LightningStrategy

__all__ = ["FabricStrategy", "LightningStrategy", "TrainerCallback"]

_HOMES = {
    "FabricStrategy": "strategies.integrations.fabric",
    "LightningStrategy": "strategies.integrations.lightning",
    "TrainerCallback": "strategies.integrations.huggingface",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsplan.integrations' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
