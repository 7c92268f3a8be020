"""Observer: what is told of every step of an engine, and measures, prints or writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Observer:
    """Watches an engine train; each method does nothing unless a kind of observer says otherwise."""

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """A training forward pass of `module` is about to begin with positional and named `inputs`."""

    def loss_is(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, before its backward pass."""

    def starts(self, section: str) -> None:
        """`forward`, `backward`, `step` or a section of the script begins."""

    def ends(self, section: str) -> None:
        """The section has ended."""

    def step_ended(self) -> None:
        """An optimizer step is over."""

    def close(self) -> None:
        """Training is over: finish files."""
