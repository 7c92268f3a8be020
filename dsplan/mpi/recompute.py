"""ActivationCheckpoint: layers whose inputs are computed again in backward instead of being kept (arXiv:1604.06174)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.errors import CannotRun

Forward = Callable[..., Any]
Backward = Callable[..., Any]


@dataclass(kw_only=True, slots=True)
class _Layer:
    """A layer that has run: what is needed to run it again."""

    name: str
    others: list[Any]
    """The inputs after the first, which belong to the program: weights, biases."""
    first: Any = None
    """The first input, where it is kept."""
    is_kept: bool = False
    """Whether `first` is kept; else it is what the layer before returns."""


class ActivationCheckpoint:
    """Runs layers in a row and keeps the first input of each of `checkpoint_segments` segments alone.

        checkpoint = ActivationCheckpoint(checkpoint_segments=2)
        checkpoint.register_function("layer", forward, backward)
        for index, (weights, biases) in enumerate(layers):
            x = checkpoint.checkpoint_activations("layer", index, len(layers), [x, weights, biases])
        for index in reversed(range(len(layers))):
            gradient, *of_weights = checkpoint.backward_pass("layer", index, len(layers), gradient)

    `forward(*inputs)` returns the output; `backward(grad_output, *inputs)` the gradients of the inputs. A first input
    that is not what the layer before returned is kept too. What the program itself holds on to is not freed.

    Raises:
        CannotRun: the number of segments is below 1.
    """

    def __init__(self, checkpoint_segments: int = 1) -> None:
        if checkpoint_segments < 1:
            raise CannotRun(f"checkpoint_segments is {checkpoint_segments}; it must be at least 1")
        self._segments = checkpoint_segments
        self._functions: dict[str, tuple[Forward, Backward]] = {}
        self._layers: dict[int, _Layer] = {}
        self._last: weakref.ref[Any] | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the first inputs that are kept."""
        return sum(np.asarray(layer.first).nbytes for layer in self._layers.values() if layer.is_kept)

    def register_function(self, name: str, forward: Forward, backward: Backward) -> None:
        """Let `name` call these two."""
        self._functions[name] = (forward, backward)

    def checkpoint_activations(self, name: str, index: int, layers: int, inputs: Sequence[Any]) -> Any:
        """Run layer `index` of `layers`, and return its output.

        Raises:
            CannotRun: the name is not registered, or the layers do not run one after the other.
        """
        forward, _ = self._function(name)
        if not 0 <= index < layers or not inputs:
            raise CannotRun(f"checkpoint_activations: layer {index} of {layers} with {len(inputs)} inputs is none")
        if index == 0:
            self._layers.clear()
            self._last = None
        if len(self._layers) != index:
            raise CannotRun(
                f"checkpoint_activations: layer {index} runs after {len(self._layers)} layers; run them in order"
            )
        first, *others = inputs
        begins = index % -(-layers // self._segments) == 0
        is_kept = begins or self._last is None or self._last() is not first
        self._layers[index] = _Layer(name=name, others=others, first=first if is_kept else None, is_kept=is_kept)
        output = forward(first, *others)
        self._last = None
        with contextlib.suppress(TypeError):  # a number cannot be referred to weakly, and is kept
            self._last = weakref.ref(output)
        return output

    def backward_pass(self, name: str, index: int, layers: int, grad_output: Any) -> tuple[Any, ...]:
        """Return the gradients of a layer's inputs; from the last layer to the first.

        Raises:
            CannotRun: the layer has not run, or a later one is left.
        """
        _, backward = self._function(name)
        layer = self._layers.get(index)
        if layer is None or layer.name != name or index + 1 != len(self._layers):
            raise CannotRun(
                f"backward_pass: layer {index} ({name!r}) is not the last one left, {len(self._layers) - 1}; go from"
                " the last to the first"
            )
        if not layer.is_kept:
            self._recompute(index)
        gradients = backward(grad_output, layer.first, *layer.others)
        del self._layers[index]
        return tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)

    def _recompute(self, index: int) -> None:
        """Run a segment again up to a layer, and keep the first inputs of its layers until backward has been there."""
        start = next(number for number in range(index, -1, -1) if self._layers[number].is_kept)
        value = self._layers[start].first
        for number in range(start, index):
            layer, after = self._layers[number], self._layers[number + 1]
            value = self._function(layer.name)[0](value, *layer.others)
            after.first, after.is_kept = value, True

    def _function(self, name: str) -> tuple[Forward, Backward]:
        if name not in self._functions:
            registered = ", ".join(self._functions) or "none"
            raise CannotRun(f"{name!r} is not registered (registered: {registered}); call register_function first")
        return self._functions[name]
