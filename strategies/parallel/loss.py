"""The loss over a vocabulary that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from strategies.errors import CannotRun
from strategies.parallel.ranks import TensorRanks, all_reduce, gather_from_ranks


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: dist.ProcessGroup | TensorRanks | None = None,
) -> torch.Tensor:
    """Return the cross-entropy, nats, of logits whose vocabulary is split over ranks.

    They are not gathered: three all-reduces of one number per target suffice.

    Args:
        logits: this rank's part, [..., part of the vocabulary], as a column layer over the vocabulary gives it.
        targets: tokens, [...].
        vocabulary: its whole length; None: that of the part times the number of ranks.
        ignore_index: the target that counts for nothing.
        reduction: `mean` over the targets that are not `ignore_index`, `sum`, or `none`: [...].
        group: the ranks that share the vocabulary, or `ranks` of the layer that made the logits; None: all of the job.

    Raises:
        CannotRun: there is no such reduction, or all of the job were taken and they read different targets.
    """
    if reduction not in ("mean", "sum", "none"):
        raise CannotRun(f"vocab_parallel_cross_entropy: reduction {reduction!r} is not mean, sum or none")
    ranks = group if isinstance(group, TensorRanks) else TensorRanks(group)
    if ranks.is_whole:
        flat = functional.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignore_index, reduction=reduction
        )
        return flat.view_as(targets) if reduction == "none" else flat
    if group is None and not _reads_alike:
        _require_same(targets, ranks)
        _reads_alike.append(True)
    whole = logits.shape[-1] * ranks.size if vocabulary is None else vocabulary
    losses: torch.Tensor = _CrossEntropy.apply(logits, targets, ranks.share(whole)[0], ignore_index, ranks)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


_reads_alike: list[bool] = []
"""Not empty once all ranks of the job were seen to have the same targets: looked at once, since it waits for the
device."""


def _require_same(targets: torch.Tensor, ranks: TensorRanks) -> None:
    largest = all_reduce(torch.stack((targets, -targets)), ranks, "max")
    if not torch.equal(largest[0], -largest[1]):
        raise CannotRun(
            f"vocab_parallel_cross_entropy: the {ranks.size} ranks of the job read different targets; give group=, the"
            " ranks of the layer that made the logits (`group=self.head.ranks`)"
        )


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, ignore_index: int, ranks: TensorRanks
    ) -> torch.Tensor:
        largest = logits.amax(-1).float() if logits.shape[-1] else logits.new_full(targets.shape, -torch.inf).float()
        largest = all_reduce(largest, ranks, "max")
        shares = logits.float() - largest.unsqueeze(-1)
        own = targets - first
        absent = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(absent, 0)
        chosen = shares.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill_(absent, 0)
        shares.exp_()
        chosen, total = all_reduce(torch.stack((chosen, shares.sum(-1))), ranks).unbind()
        shares.div_(total.unsqueeze(-1))
        counts = targets != ignore_index
        ctx.save_for_backward(shares, own, absent, counts)
        ctx.dtype = logits.dtype
        return (total.log() - chosen).masked_fill_(~counts, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, own, absent, counts = ctx.saved_tensors
        scale = gradient.float().masked_fill(~counts, 0)
        gradients = shares * scale.unsqueeze(-1)
        gradients.scatter_add_(-1, own.unsqueeze(-1), -scale.masked_fill(absent, 0).unsqueeze(-1))
        return gradients.to(ctx.dtype), None, None, None, None


class CausalLoss:
    """transformers' `ForCausalLMLoss` of logits whose vocabulary is split; `whole` is what the model had."""

    def __init__(self, ranks: TensorRanks, vocabulary: int, whole: Callable[..., torch.Tensor]) -> None:
        self._ranks, self._vocabulary, self._whole = ranks, vocabulary, whole

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int = 0,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Return the mean over labels that count, or their sum over `num_items_in_batch`."""
        if self._ranks.is_whole or logits.shape[-1] == self._vocabulary:
            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels, **others}
            return self._whole(logits, labels, vocab_size, ignore_index=ignore_index, **given)
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels.to(logits.device).view(logits.shape[:-1]),
            vocabulary=self._vocabulary,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            group=self._ranks,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class WholeLogits:
    """A hook that gathers logits without a loss and in evaluation; training with a loss leaves them out."""

    def __init__(self, ranks: TensorRanks, vocabulary: int) -> None:
        self._ranks, self._vocabulary = ranks, vocabulary

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Gather the logits of an output, or drop them."""
        logits = getattr(output, "logits", None)
        if self._ranks.is_whole or not isinstance(logits, torch.Tensor) or logits.shape[-1] == self._vocabulary:
            return output
        is_read = not module.training or getattr(output, "loss", None) is None
        output.logits = gather_from_ranks(logits, self._ranks, -1, length=self._vocabulary) if is_read else None
        return output
