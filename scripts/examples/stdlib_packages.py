"""Passages of eight packages of Python's standard library: which package is each from? Real text without a download."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import Dataset

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY = 4096
"""Tokens: the commonest words and signs, after these three."""
OTHER, CLASSIFY, MASK = range(3)
_HELD_OUT = 8
"""Every eighth passage is for testing."""


def _words(package: str) -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"], package)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")))
    return re.findall(r"\w+|[^\w\s]", text)


def _tokens() -> list[torch.Tensor]:
    """The words of every package as numbers, the commonest first."""
    words = [_words(package) for package in PACKAGES]
    common = Counter(word for package in words for word in package).most_common(VOCABULARY - 3)
    numbers = {word: number for number, (word, _) in enumerate(common, start=3)}
    return [torch.tensor([numbers.get(word, OTHER) for word in package]) for package in words]


class Passages(Dataset[dict[str, torch.Tensor]]):
    """`input_ids`, [length], and the package's number as `labels`; as many of every package, in turn."""

    def __init__(self, *, length: int, held_out: bool) -> None:
        self._texts = _tokens()
        self._length = length - 1
        windows = range(min(len(text) for text in self._texts) // self._length)
        self._windows = [window for window in windows if (window % _HELD_OUT == 0) is held_out]

    def __len__(self) -> int:
        return len(self._windows) * len(PACKAGES)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window, package = divmod(index, len(PACKAGES))
        start = self._windows[window] * self._length
        text = self._texts[package][start : start + self._length]
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
