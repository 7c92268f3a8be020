"""Passages of eight packages of Python's standard library: which package is each from? Real text without a download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
CLASSIFY, MASK = 256, 257
VOCABULARY = 258
"""Tokens: a byte each, the one that every passage begins with, and the one that hides another."""
_HELD_OUT = 8
"""Every eighth passage is for testing."""


def _source(package: str) -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"], package)
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))


class Passages(Dataset[dict[str, torch.Tensor]]):
    """`input_ids`, [length], and the package's number as `labels`; as many of every package, in turn."""

    def __init__(self, *, length: int, held_out: bool) -> None:
        self._texts = [torch.frombuffer(bytearray(_source(package)), dtype=torch.uint8) for package in PACKAGES]
        self._length = length - 1
        windows = range(min(len(text) for text in self._texts) // self._length)
        self._windows = [window for window in windows if (window % _HELD_OUT == 0) is held_out]

    def __len__(self) -> int:
        return len(self._windows) * len(PACKAGES)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window, package = divmod(index, len(PACKAGES))
        start = self._windows[window] * self._length
        text = self._texts[package][start : start + self._length].long()
        return {"input_ids": torch.cat((torch.tensor([CLASSIFY]), text)), "labels": torch.tensor(package)}


class Masked(Dataset[dict[str, torch.Tensor]]):
    """The training passages with 15 % of their tokens hidden: `labels` are the hidden ones, -100 elsewhere."""

    def __init__(self, *, length: int) -> None:
        self._passages = Passages(length=length, held_out=False)

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._passages[index]["input_ids"]
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(index)) < 0.15
        return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}
