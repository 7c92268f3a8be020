"""Activation checkpointing as a script or a plan asks for it, under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from strategies.errors import CannotRun
from strategies.protocols import TrainingParts
from strategies.tracing.step import checkpointing

Predicate = Callable[[nn.Module], bool]


def checkpoint_activations(
    model: nn.Module, predicate: Predicate, *, policy: str = "full", on_host: bool = False
) -> list[nn.Module]:
    """Let chosen modules of `model` compute again in backward what they computed in forward, instead of keeping it.

    Call it before `initialize`, which then plans with what is left and adds no checkpointing of its own.

    Args:
        model: it is changed in place.
        predicate: asked of the model's modules from the outside in; inside a chosen one it is not asked.
        policy: `full` keeps a module's inputs alone, `selective` results of matrix products and attention as well.
        on_host: the inputs wait in host memory (pinned, copied beside the computation).

    Returns:
        The chosen modules.

    Raises:
        CannotRun: no module was chosen, some were before, or there is no such policy.
    """
    if policy not in ("full", "selective"):
        raise CannotRun(f"checkpoint_activations: policy {policy!r} is not known; use 'full' or 'selective'")
    if checkpointing.recomputed_modules(model):
        raise CannotRun("checkpoint_activations was called for this model before; call it once, with one predicate")
    chosen = list(dict.fromkeys(_choose(model, predicate)))
    if not chosen:
        raise CannotRun(
            f"checkpoint_activations: the predicate chose no module of {type(model).__name__}; print model.modules() to"
            " see their classes"
        )
    checkpointing.recompute(model, chosen, policy, on_host=on_host)
    return chosen


def apply_plan(parts: TrainingParts) -> None:
    """Make the model recompute as the plan says, unless the script has chosen modules itself.

    Raises:
        CannotRun: the script has, and the plan asks for more.
        DsplanError: the model has no blocks to checkpoint.
    """
    configuration = parts.plan.configuration
    kind = configuration.activation_checkpointing
    on_host = configuration.activations_on_host or parts.script.activations.cpu_checkpointing
    if not checkpointing.recomputed_modules(parts.model):
        checkpointing.checkpoint_activations(parts.model, kind, on_host=on_host, every=configuration.checkpoint_every)
    elif kind != "none":
        raise CannotRun(
            f"the plan has activation checkpointing {kind!r} and the script chose modules itself by"
            " checkpoint_activations; leave out one of them"
        )


def _choose(module: nn.Module, predicate: Predicate) -> Iterator[nn.Module]:
    # Containers without a forward of their own cannot be run, so they cannot be run again.
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) and predicate(module):
        yield module
        return
    for child in module.children():
        yield from _choose(child, predicate)
