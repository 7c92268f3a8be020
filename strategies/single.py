"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from strategies.errors import CannotRun
from strategies.precision import autocast
from strategies.torch_engine import TorchStrategy


class Single(TorchStrategy):
    """The model as it is, on this process's device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.environment.world_size > 1:
            raise CannotRun(
                f"strategy 'single' runs one process and this job has {self.environment.world_size}; start one process"
                " or choose 'ddp'"
            )
        return model.to(self.environment.device)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.configuration.precision, self.environment.device)
