"""Real text that every machine has: the sources of Python's standard library, as numbers of words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from zlib import crc32

import torch

_MODULES = ("argparse", "datetime", "inspect", "ipaddress", "pickle", "tarfile", "turtle", "typing")
_WORD = re.compile(rb"\w+|[^\w\s]")


@cache
def _words() -> tuple[int, ...]:
    folder = Path(os.__file__).parent
    sources = [(folder / f"{name}.py") for name in _MODULES]
    found = [word for source in sources if source.exists() for word in _WORD.findall(source.read_bytes())]
    return tuple(crc32(word) for word in found)


def text_batches(
    vocabulary: int, samples: int, length: int, *, seed: int, device: torch.device
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Endless micro-batches of `samples` x `length` words with themselves as labels; `seed` says where they begin.

    A word's number is its checksum modulo `vocabulary`: frequent words stay frequent, as in a real vocabulary.
    """
    words = torch.tensor(_words()) % vocabulary
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(words) - length, (samples, 1), generator=generator)
        batch = words[starts + torch.arange(length)].to(device)
        yield {"input_ids": batch, "labels": batch.clone()}
