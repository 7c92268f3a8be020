"""Steps of a script in which nobody follows a plan: seen through torch's own hooks of optimizers and of backward.

Until somebody has taken the run over (strategies/run_directory/claim.py), every backward pass and optimizer step comes
by here. Where a plan was asked for, the first of them is refused before it changes anything. Else the steps are
measured: a step is one of the first optimizer that steps, its loss the mean of the scalars that backward started from,
its memory what torch's allocator or the storage tracker counts. Samples and tokens cannot be seen from here. Imported
while torch is, so that nothing of torch is imported at its top.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hardware_db.notices import notice
from strategies.launch.hooks import capabilities
from strategies.launch.hooks.patch import patch
from strategies.run_directory import claim
from strategies.run_directory.heartbeat import PULSE
from strategies.variables import RUN_DIRECTORY

if TYPE_CHECKING:
    import torch

    from strategies.telemetry.monitor import RunMonitor


class _Observer:
    """One rank's steps, until somebody takes the run over."""

    def __init__(self) -> None:
        self._is_over = False
        self._monitor: RunMonitor | None = None
        self._first: weakref.ref[torch.optim.Optimizer] | None = None

    def stand_by(self, optimizers: ModuleType) -> None:
        """See every optimizer's steps."""
        optimizers.register_optimizer_step_pre_hook(self._step_starts)
        optimizers.register_optimizer_step_post_hook(self._step_ended)

    @property
    def is_needed(self) -> bool:
        """True while what comes by is to be looked at, which is until somebody has taken the run over."""
        if claim.is_taken_over() and not self._is_over:
            # The hooks stay: torch goes through them while it calls them.
            self._is_over = True
            if self._monitor is not None:
                self._monitor.close()
        return not self._is_over and not claim.is_own_work()

    def backward_starts(self, tensors: Any) -> None:
        """Note that a backward pass begins from a tensor, or from several."""
        capabilities.refuse_unplanned_step()
        roots = [tensors] if hasattr(tensors, "backward") else list(tensors)
        if len(roots) == 1 and roots[0].numel() == 1:
            self._watching(roots[0].device).loss_is(roots[0].detach().reshape(()))

    def _step_starts(self, optimizer: Any, positional: Any, named: Any) -> None:
        if self.is_needed:
            capabilities.refuse_unplanned_step()

    def _step_ended(self, optimizer: torch.optim.Optimizer, positional: Any, named: Any) -> None:
        if not self.is_needed:
            return
        if self._first is None:
            self._first = weakref.ref(optimizer)
            self._say()
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            claim.note_unplanned(sum(weight.numel() for weight in weights))
        elif self._first() is not optimizer:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        monitor = self._watching(weights[0].device)
        monitor.step_ended()
        PULSE.step += 1
        PULSE.call()
        monitor.memory_starts(weights)

    def _watching(self, device: torch.device) -> RunMonitor:
        """Return the monitor, made at the first sign of training: what came before it is not a step's."""
        if self._monitor is None:
            from strategies.telemetry.monitor import RunMonitor

            self._monitor = RunMonitor(
                Path(os.environ[RUN_DIRECTORY]), rank=int(os.environ["RANK"]), device=device, sequence_length=0
            )
            self._monitor.training_starts()
        return self._monitor

    def _say(self) -> None:
        if claim.claimed() is None:
            sentence = f"trains with none of {capabilities.LIBRARIES}: runs as it is, measured, without a plan"
            notice(sentence, stream="stdout", rank_zero=True)


_observer = _Observer()
_listeners: list[Callable[[torch.Tensor], object]] = []


def when_backward_starts(listener: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    """Call this with the scalar from which a backward pass of this process begins; what is returned ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def watch_steps(optimizers: ModuleType) -> None:
    """Stand by for steps; called with torch.optim.optimizer, once that was imported."""
    _observer.stand_by(optimizers)


def watch_backward(autograd: ModuleType) -> None:
    """Stand by for backward passes: `Tensor.backward` too calls the function that is in `torch.autograd`."""
    original: Callable[..., Any] = autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *rest: Any, **named: Any) -> Any:
        if _observer.is_needed:
            _observer.backward_starts(tensors)
        for listener in _listeners:
            if hasattr(tensors, "backward") and tensors.numel() == 1:
                listener(tensors.detach().reshape(()))
        return original(tensors, *rest, **named)

    patch(autograd, "backward", backward)
