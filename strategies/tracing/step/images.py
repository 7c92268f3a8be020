"""Images of vision-language models in a trace: what a batch holds of them, and the values that fake tensors lack.

Qwen's image towers cut every image into patches of its own size and read the grid of patches as numbers: how long each
attention is depends on it. The grid is therefore a real tensor in a batch of fake ones, and what is computed from
whole numbers that are all known is computed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from strategies.torch_compat.dispatch import FakeTensor, without_modes
from strategies.torch_compat.tensors import tree_leaves

_READ_FROM_GRIDS = ("get_vision_position_ids", "get_vision_attention_seqlens", "get_vision_window_index")
"""Functions of transformers that make indices from a grid alone."""


def images_of(config: Any, samples: int, length: int) -> dict[str, Any]:
    """Return an image for each sample, sized by the image tower's config, beside texts of `length` tokens.

    To be called inside a `FakeTensorMode`.
    """
    vision = config.vision_config
    if not hasattr(vision, "spatial_merge_size"):
        return {"pixel_values": torch.zeros(samples, vision.num_channels, vision.image_size, vision.image_size)}
    side = vision.image_size // vision.patch_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    with without_modes():
        grid = torch.tensor([[1, side, side]] * samples)
    return {
        "pixel_values": torch.zeros(samples * side**2, width),
        "image_grid_thw": grid,
        # transformers computes them from the kinds of the tokens, which a trace does not know.
        "position_ids": torch.zeros(3, samples, length, dtype=torch.long),
    }


def is_known(value: object) -> bool:
    """Return whether a tensor of a trace has values: whole numbers that are no fake tensor."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_floating_point()


@contextlib.contextmanager
def follow_images(module: nn.Module) -> Iterator[None]:
    """Keep a transformers model from comparing image tokens with images, and give it the grids of its patches."""
    home: Any = sys.modules.get(type(module).__module__)
    with contextlib.ExitStack() as restored:
        _replace(home, "torch_compilable_check", lambda _: _passed, restored)
        for name in _READ_FROM_GRIDS:
            _replace(home, name, _computed, restored)
        if hasattr(home, _READ_FROM_GRIDS[0]):
            restored.enter_context(KnownValues())
        yield


def _replace(home: Any, name: str, changed: Callable[[Any], Any], restored: contextlib.ExitStack) -> None:
    original = getattr(home, name, None)
    if original is not None:
        setattr(home, name, changed(original))
        restored.callback(setattr, home, name, original)


def _passed(*_arguments: object, **_named: object) -> None:
    return None


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with real tensors, whatever mode is on."""

    @functools.wraps(function)
    def computed(*arguments: Any, **named: Any) -> Any:
        with without_modes():
            return function(*arguments, **named)

    return computed


class KnownValues(TorchFunctionMode):
    """Computes what is asked of known values alone; with fake tensors beside them they are shapes like those.

    What a known mask picks out of a fake tensor has as many rows as the mask has hits.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and is_known(args[1]) and args[1].dtype is torch.bool:
            with without_modes():
                hits = args[1].nonzero(as_tuple=True)
            args = (args[0], hits)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or not all(map(is_known, tensors)):
            return func(*args, **(kwargs or {}))
        with without_modes():
            return func(*args, **(kwargs or {}))
