"""The numeric trial: a block of a model, split, has to compute what it computes whole.

It is called as the model calls it. Outputs and gradients of input and parameters are compared, on a copy in fp32.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strategies.parallel.empty import is_stand_in
from strategies.parallel.ranks import TensorRanks, all_reduce
from strategies.parallel.stages import show_inputs
from strategies.parallel.styles import Applied, is_linear, region_end, region_start, widths
from strategies.parallel.units import Choice
from strategies.parallel.whole import sum_over_copies
from strategies.torch_compat.dispatch import FakeTensor
from strategies.torch_compat.tensors import tree_map

_log = logging.getLogger(__name__)
_TOLERANCE = 1e-3
"""Of a block computed in fp32, against the largest element: sums in another order differ by 2^-24 each."""


class Trial:
    """A block of a model run whole and split, on a copy and in fp32, with the arguments of the model's call."""

    problem = ""
    """What was raised by a run that failed, in parentheses."""

    def __init__(
        self, inner: nn.Module, block: nn.Module, ranks: TensorRanks, device: torch.device, *, sequence: bool
    ) -> None:
        self._ranks, self._device, self._sequence = ranks, device, sequence
        self._is_fake = is_fake(block)
        positions = getattr(getattr(inner, "config", None), "max_position_embeddings", None) or 4 * ranks.size
        self._arguments = arguments_of(inner, block, ranks.size * max(1, min(4, positions // ranks.size)))
        if self._arguments is not None and any(map(is_stand_in, inner.parameters())):
            (states, *rest), named = self._arguments
            drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
            self._arguments = (drawn.to(states), *rest), named  # tables that are still to be read make them zeros
        self._references: dict[nn.Module, tuple[nn.Module, _Outcome] | None] = {}

    def runs(self, block: nn.Module) -> bool:
        """Return whether the block can be run by itself."""
        return self._reference(block) is not None

    def agrees(
        self, block: nn.Module, choices: Sequence[Choice], split: Callable[[nn.Module, Sequence[Choice]], Applied]
    ) -> frozenset[str] | None:
        """Split a copy of a block, and return which unsplit parameters have a part of their gradient on each rank.

        None where the copy does not compute what the whole block computes, on some rank.

        Raises:
            NotSplit: it cannot be split so.
        """
        reference = self._reference(block)
        if reference is None:
            return frozenset(split(copy.deepcopy(block), choices).summed)
        module, whole = reference
        copied = copy.deepcopy(module)
        applied = split(copied, choices)
        if self._sequence:
            copied.register_forward_pre_hook(region_start(self._ranks), prepend=True, with_kwargs=True)
            copied.register_forward_hook(region_end(self._ranks))
        self.problem = ""
        try:
            outcome = self._run(copied)
        except Exception as problem:  # whatever a forward raises with shapes that it does not expect, on every rank
            outcome, self.problem = None, f" ({type(problem).__name__}: {str(problem).partition(chr(10))[0]})"
        if outcome is None or self._is_fake:
            return None if outcome is None else frozenset(applied.summed)
        return self._compare(outcome, whole, applied)

    def _compare(self, outcome: _Outcome, whole: _Outcome, applied: Applied) -> frozenset[str] | None:
        ranks, floor = self._ranks, 1e-3 * max(float(g.abs().max()) for g in whole.gradients.values())
        is_right = [_is_close(outcome.output, whole.output, 0.0), _is_close(outcome.input, whole.input, 0.0)]
        names, own, total = [], [], []
        for name, gradient in outcome.gradients.items():
            expected = whole.gradients[name]
            if split := applied.splits.get(name):
                complete = sum_over_copies(gradient, split, ranks)
                is_right.append(_is_close(complete, split.take(expected), floor))
                continue
            names.append(name)
            own.append(_is_close(gradient, expected, floor))
            total.append(_is_close(all_reduce(gradient.clone(), ranks), expected, floor))
        flags = torch.tensor([*is_right, *own, *total], dtype=torch.int32, device=self._device)
        seen = all_reduce(flags, ranks, "min").tolist()
        count = len(is_right)
        summed = set()
        for name, whole_there, parts_there in zip(
            names, seen[count : count + len(names)], seen[count + len(names) :], strict=True
        ):
            if not whole_there and not parts_there:
                return None
            if parts_there and (name in applied.summed or not whole_there):
                summed.add(name)
        return frozenset(summed) if all(seen[:count]) else None

    def _reference(self, block: nn.Module) -> tuple[nn.Module, _Outcome] | None:
        """Return a copy of the whole block and what it computes; None: it does not run by itself."""
        if block not in self._references:
            self._references.clear()  # one block's copy at a time
            self._references[block] = self._run_whole(block)
        return self._references[block]

    def _run_whole(self, block: nn.Module) -> tuple[nn.Module, _Outcome] | None:
        if self._arguments is None:
            return None
        # A deep copy takes what is in its memo: no weight that is still to be read is made on the host.
        drawn = {id(weight): self._draw(weight) for weight in block.parameters() if is_stand_in(weight)}
        reference = copy.deepcopy(block, dict(drawn)).eval()
        if not self._is_fake:
            reference.to(self._device).float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_()
                    if not self._is_fake and not parameter.any():  # zeros hide what they are multiplied with
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
        try:
            return reference, self._run(reference)
        except Exception:  # a block that wants other arguments may raise anything
            _log.debug("%s does not run by itself", type(block).__name__, exc_info=True)
            return None

    def _draw(self, weight: torch.Tensor) -> nn.Parameter:
        """Draw a weight that is still to be read: products keep the size of what they are of, and norms do.

        Smaller ones would hide a wrong split: with equal scores attention does not depend on queries and keys.
        """
        generator = torch.Generator(self._device).manual_seed(weight.numel())
        values = torch.randn(weight.shape, generator=generator, device=self._device)
        values = values.div_(math.sqrt(weight.shape[-1])) if weight.dim() > 1 else values.div_(10).add_(1)
        return nn.Parameter(values, requires_grad=weight.requires_grad)

    def _run(self, block: nn.Module) -> _Outcome:
        assert self._arguments is not None
        positional, named = self._arguments
        with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
            dtype = next(parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
            states, *rest = tree_map(lambda leaf: _move(leaf, self._device, dtype), positional)
            named = tree_map(lambda leaf: _move(leaf, self._device, dtype), named)
            states = states.clone().requires_grad_()
            output = block(states, *rest, **named)
            output = output if isinstance(output, torch.Tensor) else output[0]
            generator = torch.Generator().manual_seed(1)
            weights = torch.randn(output.shape, generator=generator).to(output)
            names = [name for name, parameter in block.named_parameters() if parameter.requires_grad]
            wanted = [dict(block.named_parameters())[name] for name in names]
            of_input, *of_weights = torch.autograd.grad((output * weights).sum(), [states, *wanted], allow_unused=True)
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for name, parameter, gradient in zip(names, wanted, of_weights, strict=True)
        }
        of_input = torch.zeros_like(states) if of_input is None else of_input
        return _Outcome(output=output.detach(), input=of_input, gradients=gradients)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """Results of a block."""

    output: torch.Tensor
    input: torch.Tensor
    """The gradient of the activations that it was given."""
    gradients: dict[str, torch.Tensor]


def _is_close(actual: torch.Tensor, expected: torch.Tensor, floor: float) -> bool:
    if actual.shape != expected.shape:
        return False
    scale = max(float(expected.abs().max()), floor) if expected.numel() else 0.0
    return not expected.numel() or float((actual - expected).abs().max()) <= _TOLERANCE * scale


def is_fake(module: nn.Module) -> bool:
    """Return whether a module has shapes and no values, so that a split can be tried and not compared."""
    return any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in module.parameters())


def _move(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach() if isinstance(leaf, FakeTensor) else leaf.detach().to(device)
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


# The arguments with which a model calls its blocks, so that one of them can be run by itself.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones, the activations first, and those by name."""


class _Reached(Exception):
    """A forward pass has come to the block whose arguments are wanted."""


def arguments_of(inner: Any, block: nn.Module, length: int) -> Arguments | None:
    """Return what a model calls its block with for tokens of so many positions; None: not known."""
    vocabulary = getattr(getattr(inner, "config", None), "vocab_size", 0)
    is_named = bool(vocabulary) and getattr(inner, "main_input_name", "") == "input_ids"
    if not is_named:
        rows = [module.num_embeddings for module in inner.modules() if isinstance(module, nn.Embedding)]
        vocabulary = min(rows, default=0)  # which of its tables tokens are looked up in is not known
    if vocabulary:
        device = next(inner.parameters()).device
        tokens = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(2)).to(device)
        named = {"input_ids": tokens, "use_cache": False} if is_named else {}
        captured = _capture(inner, block, () if is_named else (tokens,) * _count_required(inner), named)
        if captured is not None:
            return captured
    inputs = [widths(module)[0] for module in block.modules() if is_linear(module)]
    if not inputs:
        return None
    return (torch.randn(2, length, inputs[0], generator=torch.Generator().manual_seed(2)),), {}


def _count_required(module: nn.Module) -> int:
    """Count the positional arguments that a forward pass has to be given; one at least."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return max(1, sum(1 for taken in parameters if taken.kind in kinds and taken.default is inspect.Parameter.empty))


def _capture(inner: nn.Module, block: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments | None:
    seen: list[Arguments] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, dict(kwargs)))
        raise _Reached

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), show_inputs(inner):
            inner(*given, **named)
    except _Reached:
        pass
    except Exception:  # whatever a model raises that wants other arguments
        _log.debug("%s does not come to its blocks", type(inner).__name__, exc_info=True)
    finally:
        handle.remove()
    if not seen:
        return None
    args, kwargs = seen[0]
    if not args and "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"),)
    return (args, kwargs) if args and isinstance(args[0], torch.Tensor) else None
