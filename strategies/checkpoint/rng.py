"""Random states: each rank saves its own, and takes it back where it resumes under the same number."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

PREFIX = "rng/"


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
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in saved.items()
        if name.startswith(PREFIX) and name.endswith(f"/{rank}")
    }


def restore(values: Mapping[str, torch.Tensor], rank: int) -> None:
    """Go on from the states that `room` has read; a rank that was not there before keeps its own."""
    found = {
        name.removeprefix(PREFIX).removesuffix(f"/{rank}"): value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "python" in found:
        version, *words = found["python"].tolist()
        has_next, gauss = found["python_gauss"].tolist()
        random.setstate((version, tuple(words), gauss if has_next else None))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found and "numpy" in sys.modules:
        *keys, position, has_gauss = found["numpy"].tolist()
        cached = found["numpy_gauss"].item()
        sys.modules["numpy"].random.set_state(("MT19937", keys, position, has_gauss, cached))
