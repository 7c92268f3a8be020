"""`dsplan.checkpointing.checkpoint(model, predicate)`, DeepSpeed's place for `dsplan.checkpoint_activations`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from strategies.modules.activation_checkpointing import Predicate

__all__ = ["checkpoint"]

Model = TypeVar("Model", bound="nn.Module")


def checkpoint(model: Model, predicate: Predicate, *, policy: str = "full", on_host: bool = False) -> Model:
    """`dsplan.checkpoint_activations`, which describes the arguments; returns the model itself."""
    from strategies.modules.activation_checkpointing import checkpoint_activations

    checkpoint_activations(model, predicate, policy=policy, on_host=on_host)
    return model
