"""Random states: each rank saves its own, and takes it back where it resumes under the same number."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

PREFIX = "rng/"
_MOST = {"torch": 2**13, "python": 2**10, "python_gauss": 2, "cuda": 2**10, "numpy": 2**10, "numpy_gauss": 1}
"""Kinds of states, and elements that each has at most; torch's has 5,056."""


def tensors(rank: int) -> dict[str, torch.Tensor]:
    """Return the states of torch, Python, CUDA where this process uses it, and numpy where it is loaded."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float(gauss is not None), gauss or 0.0], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        if name == "MT19937":
            states["numpy"] = torch.tensor([*(int(key) for key in keys), int(position), int(has_gauss)])
            states["numpy_gauss"] = torch.tensor([float(cached)], dtype=torch.float64)
    return {f"{PREFIX}{kind}/{rank}": state for kind, state in states.items()}


def room(rank: int, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make room for this rank's states; empty where fewer ranks saved."""
    own = {f"{PREFIX}{kind}/{rank}": kind for kind in _MOST}
    return {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        for name, kind in own.items()
        if name in saved and saved[name].size.numel() <= _MOST[kind]
    }


def require(values: Mapping[str, torch.Tensor], rank: int) -> None:
    """Try the states that were read, on generators of their own.

    Raises:
        ValueError: one of them is none; it names which.
    """
    states = _by_kind(values, rank)
    for kind, attempt in (
        ("torch", lambda: torch.Generator().set_state(states["torch"])),
        ("python", lambda: random.Random().setstate(_python(states))),
        ("cuda", lambda: _try_cuda(states["cuda"])),
        ("numpy", lambda: _require_numpy(states)),
    ):
        if kind not in states:
            continue
        try:
            attempt()
        except (ValueError, TypeError, RuntimeError, KeyError, OverflowError, IndexError):
            raise ValueError(f"its state of {kind}'s random numbers is none") from None


def restore(values: Mapping[str, torch.Tensor], rank: int) -> None:
    """Resume from the states that `room` has read; a rank that was not there before keeps its own."""
    states = _by_kind(values, rank)
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(_python(states))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_numpy(states))


def _by_kind(values: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(PREFIX).removesuffix(f"/{rank}"): value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }


def _python(states: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    version, *words = states["python"].tolist()
    has_next, gauss = states["python_gauss"].tolist()
    return version, tuple(words), gauss if has_next else None


def _numpy(states: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    *keys, position, has_gauss = states["numpy"].tolist()
    return "MT19937", keys, position, has_gauss, states["numpy_gauss"].item()


def _require_numpy(states: Mapping[str, torch.Tensor]) -> None:
    _, keys, position, has_gauss, _ = _numpy(states)
    # numpy takes any position, and reads beyond its 624 words from there.
    is_in_words = 0 <= position <= 624 and all(0 <= key < 2**32 for key in keys)
    if len(keys) != 624 or not is_in_words or has_gauss not in (0, 1):
        raise ValueError


def _try_cuda(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.Generator("cuda").set_state(state)
