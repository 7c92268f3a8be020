"""Latecomers: parameters that are unfrozen, or given to the optimizer, after the engine was made."""

from __future__ import annotations

from torch import nn

from strategies.errors import CannotRun
from strategies.optimizer_needs import undivided
from strategies.zero.held import Held
from strategies.zero.optimizer import Pieces
from strategies.zero.partition import owners_of
from strategies.zero.reduce import Reducer


class Latecomers:
    """Finds them before a backward pass and has them trained from it on, as plain torch does.

    A parameter joins when it requires gradients and the optimizer holds it, whichever comes last. Every rank must make
    the same changes.
    """

    def __init__(self, module: nn.Module, held: Held, pieces: Pieces, reducer: Reducer) -> None:
        self._module, self._held, self._pieces, self._reducer = module, held, pieces, reducer
        self._asleep = self._outside()

    def welcome(self) -> None:
        """Train those that have come since the last call; costs a look at the frozen parameters where none has.

        Raises:
            CannotRun: one has a gradient of its rank alone, or must be stepped whole and is divided.
        """
        if self._pieces.has_grown:
            self._asleep = self._outside()
        elif not any(parameter.requires_grad for _, parameter in self._asleep):
            return
        stepped = {tensor for group in self._pieces.optimizer.param_groups for tensor in group["params"]}
        come = [
            (n, p) for n, p in self._asleep if p.requires_grad and (p in stepped or self._pieces.of.get(p) in stepped)
        ]
        for name, parameter in come:
            if parameter.grad is not None:
                raise CannotRun(
                    f"{name} has a gradient that was not summed over ranks; have it in the optimizer before the first"
                    " backward pass of a step that makes one"
                )
        whole = undivided(self._pieces.optimizer, (parameter for _, parameter in come))
        owners = owners_of(whole, self._held.home.wire.ranks.world_size)
        made = self._held.admit(come, owners)
        self._reducer.take(made)
        self._pieces.add(made)
        self._asleep = self._outside()

    def _outside(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the model whose gradients are not summed."""
        return [(name, p) for name, p in self._module.named_parameters() if not self._reducer.sums(p)]
