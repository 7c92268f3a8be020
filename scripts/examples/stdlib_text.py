"""Real text without a download: the sources of Python's standard library, one token per byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

VOCABULARY = 256


class StdlibText(Dataset[dict[str, torch.Tensor]]):
    """Windows of `length` bytes over the standard library's modules, as `input_ids` and `labels` of shape (length,)."""

    def __init__(self, *, length: int, windows: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            if len(text) >= length * windows:
                break
            text += path.read_bytes()
        self._length = length
        self._bytes = torch.frombuffer(text, dtype=torch.uint8)
        self._windows = min(windows, len(text) // length)

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self._length
        window = self._bytes[start : start + self._length].long()
        return {"input_ids": window, "labels": window.clone()}
