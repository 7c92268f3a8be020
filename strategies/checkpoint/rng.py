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
    """The states of torch, Python, CUDA where this process uses it, and numpy where it is loaded."""
    found = {"torch": torch.get_rng_state()}
    version, words, gauss = random.getstate()
    has_next = gauss is not None
    found["python"] = torch.tensor([version, *words], dtype=torch.int64)
    found["python_gauss"] = torch.tensor([float(has_next), gauss or 0.0], dtype=torch.float64)
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        if name == "MT19937":
            found["numpy"] = torch.tensor([*(int(key) for key in keys), int(position), int(has_gauss)])
            found["numpy_gauss"] = torch.tensor([float(cached)], dtype=torch.float64)
    return {f"{PREFIX}{kind}/{rank}": state for kind, state in found.items()}


def room(rank: int, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Where this rank's states are read to; empty where fewer ranks saved."""
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
    found = _by_kind(values, rank)
    for kind, needs, attempt in (
        ("torch", (), lambda: torch.Generator().set_state(found["torch"])),
        ("python", ("python_gauss",), lambda: random.Random().setstate(_python(found))),
        ("cuda", (), lambda: _try_cuda(found["cuda"])),
        ("numpy", ("numpy_gauss",), lambda: _require_numpy(found)),
    ):
        if kind not in found:
            continue
        try:
            for need in needs:
                found[need]
            attempt()
        except (ValueError, TypeError, RuntimeError, KeyError, OverflowError, IndexError):
            raise ValueError(f"its state of {kind}'s random numbers is none") from None


def restore(values: Mapping[str, torch.Tensor], rank: int) -> None:
    """Resume from the states that `room` has read; a rank that was not there before keeps its own."""
    found = _by_kind(values, rank)
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "python" in found:
        random.setstate(_python(found))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_numpy(found))


def _by_kind(values: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(PREFIX).removesuffix(f"/{rank}"): value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }


def _python(found: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    version, *words = found["python"].tolist()
    has_next, gauss = found["python_gauss"].tolist()
    return version, tuple(words), gauss if has_next else None


def _numpy(found: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    *keys, position, has_gauss = found["numpy"].tolist()
    return "MT19937", keys, position, has_gauss, found["numpy_gauss"].item()


def _require_numpy(found: Mapping[str, torch.Tensor]) -> None:
    """numpy takes any position, and reads beyond its 624 words from there."""
    _, keys, position, has_gauss, _ = _numpy(found)
    if (
        len(keys) != 624
        or not all(0 <= key < 2**32 for key in keys)
        or not 0 <= position <= 624
        or has_gauss not in (0, 1)
    ):
        raise ValueError


def _try_cuda(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.Generator("cuda").set_state(state)
