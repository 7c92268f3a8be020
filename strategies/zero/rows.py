"""Rows: which rows of an embedding any rank used, for optimizers that step those and leave the others alone.

Sparse gradients travel in their bucket like all others, zeros and all, and a mask of rows travels beside them: a whole
bucket overlaps with backward and has one size on every rank, where lists of rows would have another in every step. From
sum and mask each rank makes the sparse gradient of its own piece.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from strategies.errors import CannotRun
from strategies.zero.wire import Wire


class TouchedRows:
    """The rows of some parameters that have had a gradient since the last `clear`."""

    def __init__(self) -> None:
        self._masks: dict[nn.Parameter, torch.Tensor] = {}

    def follow(self, name: str, parameter: nn.Parameter) -> None:
        """Note the rows of a parameter from now on."""
        self._masks[parameter] = torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device)
        parameter.register_hook(partial(self._note, name, self._masks[parameter]))  # type: ignore[no-untyped-call]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._masks

    def agree(self, wire: Wire) -> None:
        """Every rank learns of the rows of all."""
        masks = [*self._masks.values()]
        if masks:
            together = wire.sum_everywhere(torch.cat(masks))
            for mask, rows in zip(masks, torch.split(together, [*map(len, masks)]), strict=True):
                mask.copy_(rows)

    def clear(self) -> None:
        """After a step: no row has been touched."""
        for mask in self._masks.values():
            mask.zero_()

    def of(self, parameter: nn.Parameter, start: int, gradient: torch.Tensor) -> torch.Tensor:
        """The touched elements of a parameter's run that begins at `start`: sparse, [len(gradient)]."""
        width = parameter.numel() // len(parameter)
        touched = self._masks[parameter].to(gradient.device).repeat_interleave(width)[start : start + len(gradient)]
        places = touched.nonzero().t()
        return torch.sparse_coo_tensor(
            places, gradient[places[0]], gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _note(self, name: str, mask: torch.Tensor, gradient: torch.Tensor) -> None:
        if not gradient.is_sparse:
            raise CannotRun(
                f"{name} has a dense gradient, and its optimizer steps sparse ones alone; make its layer with"
                " sparse=True, or use Adam"
            )
        mask[gradient._indices()[0]] = 1
