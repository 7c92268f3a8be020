"""Optimizer: any `torch.optim` class, working on this rank's pieces of the master weights.

The optimizer object stays the script's own, with its groups, options and schedulers; only the tensors in its groups
are exchanged for pieces. A piece of a divided parameter is a run of its elements, flat. A parameter that must be
stepped whole (`strategies/optim/optimizers.py`) is one rank's: its piece there has the parameter's shape, and is empty
and never stepped elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.backends.zero.collectives import Collectives
from strategies.backends.zero.flat_shard import Bucket, Slot
from strategies.checkpoint.states import SCALARS
from strategies.distributed.gathers import require_alike
from strategies.errors import CannotRun
from strategies.modules.precision import sum_squares
from strategies.optim.optimizers import OPTIMIZERS, needs_whole_tensors, takes_sparse_gradients_only
from strategies.protocols import TrainingParts
from strategies.run_directory.heartbeat import PULSE
from strategies.torch_compat.tensors import sparse_indices

# Embedding rows that any rank used, for optimizers with sparse steps.


class TouchedRows:
    """The rows of some parameters that have had a gradient since the last `clear`."""

    def __init__(self) -> None:
        self._masks: dict[nn.Parameter, torch.Tensor] = {}

    def follow(self, name: str, parameter: nn.Parameter) -> None:
        """Note the rows of a parameter from now on."""
        self._masks[parameter] = torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device)
        parameter.register_hook(partial(self._note, name, self._masks[parameter]))  # type: ignore[no-untyped-call]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._masks

    def synchronize(self, collectives: Collectives) -> None:
        """Let every rank know of the rows of all."""
        masks = [*self._masks.values()]
        if masks:
            together = collectives.all_reduce(torch.cat(masks))
            for mask, rows in zip(masks, torch.split(together, [*map(len, masks)]), strict=True):
                mask.copy_(rows)

    def clear(self) -> None:
        """Forget the rows, after a step."""
        for mask in self._masks.values():
            mask.zero_()

    def of(self, parameter: nn.Parameter, start: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the touched elements of a parameter's run that begins at `start`: sparse, [len(gradient)]."""
        width = parameter.numel() // len(parameter)
        touched = self._masks[parameter].to(gradient.device).repeat_interleave(width)[start : start + len(gradient)]
        places = touched.nonzero().t()
        return torch.sparse_coo_tensor(
            places, gradient[places[0]], gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _note(self, name: str, mask: torch.Tensor, gradient: torch.Tensor) -> None:
        if not gradient.is_sparse:
            raise CannotRun(
                f"{name} has a dense gradient, and its optimizer steps sparse ones alone; make its layer with"
                " sparse=True, or use Adam"
            )
        mask[sparse_indices(gradient)[0]] = 1


def script_optimizer(parts: TrainingParts, trained: Sequence[Any]) -> torch.optim.Optimizer:
    """Return the script's optimizer, or the plan's over whole parameters, by whose shapes a script may group them."""
    if isinstance(parts.optimizer, torch.optim.Optimizer):
        return parts.optimizer
    return (parts.optimizer or OPTIMIZERS[parts.plan.configuration.optimizer])(trained)


class Pieces:
    """Every parameter's piece on this rank: a leaf tensor that shares the master weights' memory, maybe empty."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        collectives: Collectives,
        optimizers: Iterable[torch.optim.Optimizer],
        everyone: Collectives | None = None,
    ) -> None:
        """Take buckets; `collectives` are between all ranks that have these, whichever copy of the states is theirs.

        `everyone` connects all ranks of the job where some have other parts of the model.
        """
        self.buckets: tuple[Bucket, ...] = ()
        self.of: dict[nn.Parameter, torch.Tensor] = {}
        self.optimizers = list(optimizers)
        self._collectives, self._everyone = collectives, everyone
        self._elsewhere: set[nn.Parameter] = set()
        self._rows = TouchedRows()
        self._exchanged = 0
        self.add(buckets)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Take more buckets, and what the optimizer holds of them or of earlier ones by now.

        Raises:
            CannotRun: it holds a parameter that is not the model's, or one that it must step whole and cannot.
        """
        for bucket in buckets:
            self.buckets = (*self.buckets, bucket)
            for slot in bucket.slots:
                self.of[slot.parameter] = _piece(bucket, slot)
                if not bucket.is_divided and not bucket.owns(slot):
                    self._elsewhere.add(slot.parameter)
        self._exchange()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let one more optimizer step pieces.

        Raises:
            CannotRun: it holds a parameter that is not the model's, or one that it must step whole and cannot.
        """
        self.optimizers.append(optimizer)
        self._exchange()

    @property
    def has_grown(self) -> bool:
        """True if an optimizer has been given parameters since."""
        return self._exchanged != sum(len(group["params"]) for group in self.groups())

    def groups(self) -> Iterator[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def steps(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank steps a piece of a parameter, maybe an empty one, and has its states."""
        return parameter not in self._elsewhere

    def attach(self, buckets: Sequence[Bucket], used: set[nn.Parameter], factor: float) -> None:
        """Give each piece its gradient times `factor`; none where no rank used the parameter, which stays as it is."""
        for bucket in buckets:
            whole = bucket.gradient
            if whole is None:
                continue
            gradient = whole.to(device=bucket.master.device, dtype=bucket.master.dtype)
            bucket.gradient = gradient.mul_(factor) if factor != 1.0 else gradient
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                piece = self.of[slot.parameter]
                steps = slot.parameter in used and self.steps(slot.parameter)
                run = gradient[start:stop]
                if steps and slot.parameter in self._rows:
                    piece.grad = self._rows.of(slot.parameter, bucket.own_start(slot), run)
                else:
                    piece.grad = run.view(piece.shape) if steps else None

    def detach(self, buckets: Sequence[Bucket]) -> None:
        """Free the gradients."""
        for bucket in buckets:
            bucket.gradient = None
            for slot in bucket.slots:
                self.of[slot.parameter].grad = None

    def clear(self) -> None:
        """Forget which rows were used, after a step."""
        self._rows.clear()

    def synchronize(self, used: set[nn.Parameter], device: torch.device) -> tuple[float, set[nn.Parameter]]:
        """Return the square of the norm of all gradients, and the parameters that any rank used.

        Not a number, or infinite, where any gradient is. One small collective, and one more if ranks split the model.

        Raises:
            Parted: the ranks' calls that gather weights have differed.
        """
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        flags = [float(slot.parameter in used) for slot in slots]
        squares: list[torch.Tensor] = []
        for bucket in self.buckets:
            if bucket.gradient is not None:
                squares.append(sum_squares([bucket.gradient], device).to(device) * bucket.kind.share)
        square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        flat = torch.tensor([float(PULSE.number), *flags], dtype=torch.float64, device=device)
        sums = self._collectives.all_reduce(torch.cat((square.to(device).reshape(1), flat))).tolist()
        require_alike(sums[1], self._collectives.ranks.world_size)
        self._rows.synchronize(self._collectives)
        anywhere = {slot.parameter for slot, flag in zip(slots, sums[2:], strict=True) if flag}
        total = sums[0] if self._everyone is None else self._everyone.all_reduce(square).item()
        return total, anywhere

    def slots(self) -> Iterable[tuple[Bucket, Slot]]:
        """Return every parameter with its bucket."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.slots)

    def _exchange(self) -> None:
        """Put pieces into optimizers of whole parameters; of their states the part that belongs to the piece."""
        slots = {slot.parameter: (bucket, slot) for bucket, slot in self.slots()}
        pieces, self._exchanged = set(self.of.values()), 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    self._exchanged += 1
                    if parameter in slots:
                        bucket, slot = slots[parameter]
                        _require_divisible(optimizer, group, bucket, slot)
                        group["params"][index] = self._moved(optimizer, bucket, slot)
                    elif parameter.requires_grad and parameter not in pieces:  # what is frozen it passes over
                        raise CannotRun(
                            "the optimizer holds a parameter that is not the model's; build it from this model"
                        )

    def _moved(self, optimizer: torch.optim.Optimizer, bucket: Bucket, slot: Slot) -> torch.Tensor:
        """Return the piece of a parameter that an optimizer steps from now on, with its part of the states."""
        piece = self.of[slot.parameter]
        states = optimizer.state.pop(slot.parameter, {})
        if states and self.steps(slot.parameter):
            optimizer.state[piece] = {
                name: value if name in SCALARS else cut(value, slot, bucket.own_start(slot), piece)
                for name, value in states.items()
            }
        if takes_sparse_gradients_only(optimizer) and slot.parameter.requires_grad:
            self._rows.follow(slot.name, slot.parameter)
        return piece


def _require_divisible(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], bucket: Bucket, slot: Slot) -> None:
    if bucket.is_divided and needs_whole_tensors(optimizer, group):
        raise CannotRun(
            f"optimizer {type(optimizer).__name__} must step {slot.name} whole and ZeRO divided it; have it in the"
            " optimizer when initialize is called"
        )


def _piece(bucket: Bucket, slot: Slot) -> torch.Tensor:
    """Return a leaf tensor that shares the memory of this rank's master weights of a parameter."""
    start, stop = bucket.own_range(slot)
    run = bucket.master[start:stop].detach()
    shape = slot.parameter.shape
    if not bucket.is_divided:
        run = run.view(shape) if start < stop else run.view(0, *shape[1:])
    return run.requires_grad_()


def cut(value: Any, slot: Slot, start: int, piece: torch.Tensor) -> Any:
    """Return the piece's part of an optimizer state that has its parameter's shape; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != slot.parameter.shape:
        return value.to(piece.device)
    part = value.reshape(-1)[start : start + piece.numel()].view(piece.shape)
    wider = value.is_floating_point() and value.element_size() < piece.element_size()
    return part.to(device=piece.device, dtype=piece.dtype if wider else value.dtype, copy=True)
