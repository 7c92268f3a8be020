"""Example: what a module is called with, as shapes and dtypes, at any number of samples."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from strategies.torch_compat.tensors import tree_leaves, tree_map

_log = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SAMPLES_LOOKED_AT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Arguments of a module's `forward`, `samples` samples of them; the values of its tensors do not count.

    A tensor whose dimension 0 is as long as the batch holds a row for each sample; others, and all that is no tensor,
    stay as they are whatever the batch.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    samples: int

    def batch_of(self, samples: int) -> Arguments:
        """Return the same for another number of samples; tensors on the meta device."""
        resized = tree_map(lambda leaf: self._resized(leaf, samples), (self.positional, dict(self.named)))
        positional, named = resized
        return positional, named

    def _resized(self, leaf: Any, samples: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        grows = leaf.dim() > 0 and leaf.shape[0] == self.samples
        shape = (samples, *leaf.shape[1:]) if grows else tuple(leaf.shape)
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        return torch.empty(shape, dtype=leaf.dtype, device="meta", memory_format=layout)

    @property
    def tokens(self) -> int:
        """Return tokens per sample: the longest token ids (whole numbers in two dimensions); 0 without any."""
        ids = self.named.get("input_ids")
        leaves = [ids] if isinstance(ids, torch.Tensor) else tree_leaves((self.positional, dict(self.named)))
        return max((_ids_in(leaf) for leaf in leaves), default=0)

    @property
    def positions(self) -> int:
        """Multiplier of a rule of thumb: tokens, or rows of a matrix of features, 1 for any other sample."""
        leaves = tree_leaves((self.positional, dict(self.named)))
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)
        return self.tokens or (first.shape[1] if first is not None and first.dim() == 3 else 1)


def _ids_in(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() != 2:
        return 0
    return leaf.shape[1] if leaf.dtype in (torch.int64, torch.int32) else 0


def arguments_of(batch: Any) -> Arguments:
    """Positional and keyword arguments: those of a pair `(args, kwargs)`, a mapping's, a sequence's, or one tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        return batch[0], dict(batch[1])
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


def examples_for(module: nn.Module, batch: Any) -> Iterator[Example]:
    """Return what the module may be called with where a loader or a script holds `batch`, the likeliest first.

    A batch may hold more than the module takes (the labels of a loss that the script computes itself), and what is left
    may be no argument of the module for all that it has room for one.
    """
    positional, named = arguments_of(batch)
    samples = samples_in((positional, named))
    accepted = list(inspect.signature(module.forward).parameters.values())
    by_name = {item.name for item in accepted if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    takes_any_name = any(item.kind is item.VAR_KEYWORD for item in accepted)
    if named and not takes_any_name and not by_name & named.keys():
        positional, named = (*positional, *named.values()), {}
    kept = named if takes_any_name else {name: value for name, value in named.items() if name in by_name}
    places = [item for item in accepted if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    takes_any_number = any(item.kind is item.VAR_POSITIONAL for item in accepted)
    required = sum(item.default is item.empty and item.name not in kept for item in places)
    most = len(positional) if takes_any_number else min(len(positional), len(places))
    for count in dict.fromkeys((most, max(min(required, most), min(1, most)))):
        yield Example(positional=positional[:count], named=kept, samples=samples)


def samples_in(batch: Any) -> int:
    """Return the rows that most of its tensors have, 1 where it has no tensor with rows."""
    rows = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return Counter(rows).most_common(1)[0][0] if rows else 1


# Batches from a dataset, before any loader has made one.


def first_samples(dataset: Any) -> list[Any]:
    """Return the first samples of a dataset that can be indexed or iterated over; an iterator would lose them."""
    if dataset is None or isinstance(dataset, Iterator):
        return []
    with _keep_random_numbers():
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return [dataset[index] for index in range(min(_SAMPLES_LOOKED_AT, len(dataset)))]
        return list(itertools.islice(iter(dataset), _SAMPLES_LOOKED_AT))


@contextlib.contextmanager
def _keep_random_numbers() -> Iterator[None]:
    """Have what a sample is cut or turned by drawn again in training, on every rank alike."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(state)


def example_batch(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a batch of the dataset's first samples as the script puts it together; None where it cannot be."""
    samples = first_samples(dataset)
    for chosen in (samples, samples[:1] * 2):
        # A collator is the script's own code, which may raise anything; torch's wants samples of one length.
        try:
            return (collate or default_collate)(chosen)
        except Exception:
            _log.debug("%d samples cannot be put together", len(chosen), exc_info=True)
    return None


def longest_tokens(item: Any) -> int:
    """Return the length of the token ids in a sample or a batch of them; 0 where there are none."""
    if isinstance(item, Mapping):
        return longest_tokens(item.get("input_ids"))
    if isinstance(item, torch.Tensor):
        return item.shape[-1] if item.dim() and not item.is_floating_point() else 0
    if isinstance(item, Sequence) and item and not isinstance(item, str):
        return len(item) if all(isinstance(part, int) for part in item) else longest_tokens(item[0])
    return 0
