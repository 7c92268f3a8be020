"""Our ZeRO under a loop that is not the engine's: a script that calls `loss.backward()` and `optimizer.step()` itself.

What the engine does inside its calls happens here where autograd and the optimizer come by. A hook on what the model
returned opens the reducer when backward begins; a callback of autograd's closes it and leaves each gradient on its
piece, which is what the script's optimizer steps; a hook of the optimizer brings the weights up to date.

The model's parameters get a mark for a gradient: a tensor of NaN in their shape that takes no memory. Where the script
clears it (`model.zero_grad()`, `parameter.grad = None`), the piece's gradient is cleared; what reads it reads NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.cost.zero_bucket_sizes import native_buckets
from planner.types.plan import Configuration
from strategies.backends.zero.collectives import collectives_for
from strategies.backends.zero.engine import Latecomers
from strategies.backends.zero.flat_shard import Bucket, Ranks, Slot, owners_of
from strategies.backends.zero.gradient_reducer import Reducer
from strategies.backends.zero.offload import offload_of
from strategies.backends.zero.optimizer import Pieces, cut
from strategies.backends.zero.settings import OffloadSettings, ZeroSettings
from strategies.backends.zero.stages import STAGES
from strategies.backends.zero.weights import ShardingContext
from strategies.checkpoint.states import SCALARS
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun
from strategies.modules.compression import GradientTravel
from strategies.modules.precision import split_runs
from strategies.optim.optimizers import select_undivided
from strategies.run_directory.heartbeat import PULSE
from strategies.torch_compat.autograd import call_after_backward
from strategies.torch_compat.tensors import own_parameters, tree_leaves


class ScriptLoop:
    """A model in buckets whose script runs forward, backward and the optimizers, and keeps the model's own dtypes.

    Gradients are reduced in every backward pass where `configuration.sync_each_micro_batch` says so and the stage can;
    elsewhere in those that the script wants reduced.
    """

    def __init__(
        self,
        model: nn.Module,
        configuration: Configuration,
        environment: Environment,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.model = model
        ranks = Ranks(rank=environment.rank, world_size=environment.world_size)
        whole = [parameter for each in optimizers for parameter in select_undivided(each, model.parameters())]
        device = environment.device
        self._context = ShardingContext(
            device=device,
            collectives=collectives_for(ranks, device),
            settings=_settings(configuration, device),
            offload=offload_of(OffloadSettings(), device),
            owners=owners_of(_held_by(optimizers, whole), ranks.world_size),
        )
        stage = STAGES[configuration.zero_stage](configuration, environment)
        self._gathers = configuration.zero_stage == 3
        self._reduces_each = stage.reduces_each_micro_batch and configuration.sync_each_micro_batch
        self.sharded_model = stage.shard_model(model, self._context)
        self._reducer = Reducer(
            self.sharded_model.trained,
            lambda bucket: self._context.collectives,
            accumulate=None,
            reduce=None,
            mean_over=ranks.world_size,
        )
        self._reducer.when_unasked = self._unasked
        self.sharded_model.follow(self._reducer)
        self.pieces = Pieces(self.sharded_model.trained, self._context.collectives, ())
        self._latecomers = Latecomers(model, self.sharded_model, self.pieces, self._reducer)
        self._marks: dict[torch.Tensor, torch.Tensor] = {}
        self._nan: dict[torch.dtype, torch.Tensor] = {}
        self._attached: dict[Bucket, torch.Tensor] = {}
        self._used: set[nn.Parameter] = set()
        self._open: ExitStack | None = None
        self._copies: dict[nn.Parameter, torch.Tensor] = {}
        self._nested, self._loads = 0, ExitStack()
        self._reduces = True
        for optimizer in optimizers:
            self.adopt(optimizer)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has parameters of the model that it does not yet step as pieces."""
        return any(parameter in self.pieces.of for group in optimizer.param_groups for parameter in group["params"])

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer of the model's parameters step the pieces of them, with the states that it has.

        Raises:
            CannotRun: it holds a parameter that is not the model's, or one that it must step whole and cannot.
        """
        if optimizer in self.pieces.optimizers:
            return
        self.pieces.adopt(optimizer)
        hooked: Any = optimizer  # its methods are annotated with hooks that return what they are given
        hooked.register_step_post_hook(self._stepped)
        hooked.register_state_dict_post_hook(self._whole_state)
        hooked.register_load_state_dict_pre_hook(self._own_state)

    # Forward and backward.

    def forward_starts(self) -> None:
        """Free, before a forward pass, gradients that the script has cleared and what a broken backward pass left."""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._drop_cleared()

    def forward_ended(self, output: Any, *, reduces: bool) -> None:
        """Follow the backward pass of what a forward pass returned, whose gradients the script wants reduced or not."""
        self._reduces = reduces or self._reduces_each
        results = [tensor for tensor in tensors_in_output(output) if tensor.requires_grad]
        if results:
            torch.autograd.graph.register_multi_grad_hook(results, lambda gradient: self._begin(), mode="any")

    def _unasked(self) -> None:
        """Begin where a gradient is made of what the model has not returned, as of a loss that it keeps in itself.

        Raises:
            CannotRun: there are gradients of earlier backward passes, to which autograd has added this one wrongly.
        """
        if self._marks:
            raise CannotRun("the loss is made of tensors that the model did not return; return them, or use ddp")
        self._begin()

    def _begin(self) -> None:
        """Begin a backward pass."""
        if self._open is not None:
            return
        self._open = ExitStack()
        self._drop_cleared()
        for bucket, gradient in self._attached.items():
            bucket.gradient = gradient
            for slot in bucket.slots:
                self._take_back(bucket, slot)
        self._attached.clear()
        self._unmark()
        if not self._reducer.waiting and not any(bucket.gradient is not None for bucket in self.pieces.buckets):
            self._reducer.used.clear()
            self._used.clear()
        self._latecomers.welcome()
        self._open.enter_context(PULSE.meeting("backward") if self._gathers else nullcontext())
        self._open.enter_context(self.sharded_model.backward())
        self._reducer.begin(reduces=self._reduces)
        call_after_backward(self._end)

    def _take_back(self, bucket: Bucket, slot: Slot) -> None:
        """Make a piece's gradient part of the bucket's again; the script may have cleared or exchanged it."""
        start, stop = bucket.own_range(slot)
        piece, whole = self.pieces.of[slot.parameter], bucket.gradient
        assert whole is not None
        run = whole[start:stop]
        if piece.grad is None:
            run.zero_()
        elif piece.grad.data_ptr() != run.data_ptr():
            run.copy_(piece.grad.reshape(-1))
        piece.grad = None

    def _end(self) -> None:
        """End a backward pass: the sums over ranks become the gradients of the pieces."""
        assert self._open is not None
        self._reducer.finish()
        self._open.close()
        self._open = None
        if self._reduces:
            _, self._used = self.pieces.synchronize(self._reducer.used, self._context.device)
        self.pieces.attach(self.pieces.buckets, self._used, 1.0)
        for bucket in self.pieces.buckets:
            if bucket.gradient is not None:
                self._attached[bucket], bucket.gradient = bucket.gradient, None
        self._mark()

    # Marks, by which clearing is seen.

    def _mark(self) -> None:
        for parameter in self._used | self._reducer.used:
            self._set_mark(parameter)
            piece = self.pieces.of[parameter]
            if piece.grad is None and self.pieces.steps(parameter):
                self._set_mark(piece)  # its gradient waits to be reduced

    def _set_mark(self, tensor: torch.Tensor) -> None:
        dtype = tensor.dtype
        if dtype not in self._nan:
            self._nan[dtype] = torch.full((), torch.nan, dtype=dtype, device=self._context.device)
        tensor.grad = self._marks[tensor] = self._nan[dtype].expand(tensor.shape)

    def _unmark(self) -> None:
        for tensor, mark in self._marks.items():
            if tensor.grad is mark:
                tensor.grad = None
        self._marks.clear()

    def _drop_cleared(self) -> None:
        """Free the gradients whose parameters, or pieces, the script has cleared since they were made."""
        for parameter in [tensor for tensor in self._marks if isinstance(tensor, nn.Parameter)]:
            piece = self.pieces.of[parameter]
            waits = piece in self._marks
            if self._marks[parameter] is parameter.grad and not (waits and piece.grad is None):
                continue
            self._reducer.forget(parameter)
            parameter.grad = piece.grad = None
            self._marks.pop(parameter)
            self._marks.pop(piece, None)
        for bucket in list(self._attached):
            if all(self.pieces.of[slot.parameter].grad is None for slot in bucket.slots):
                del self._attached[bucket]

    # What the script's calls on gradients mean.

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients that this rank has of parameters, or of pieces, of the model; empty ones left out."""
        pieces = [self.pieces.of[p] if isinstance(p, nn.Parameter) and p in self.pieces.of else p for p in parameters]
        return [piece.grad for piece in pieces if piece.grad is not None and piece.numel()]

    def norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of gradients of which every rank has a part; every rank calls this together."""
        norms = [torch.linalg.vector_norm(run, norm_type).double() for run in split_runs(gradients)]
        own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=self._context.device)
        several = self._context.collectives.ranks.world_size > 1
        if norm_type in (float("inf"), float("-inf")):
            total = own.max() if norm_type > 0 else own.min()
            if several:
                dist.all_reduce(total, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN)
            return total.float()
        total = own.pow(norm_type).sum()
        return self._context.collectives.all_reduce(total).pow(1 / norm_type).float()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Bring the weights up to date on every rank when an optimizer has changed its pieces."""
        stepped = {piece for group in optimizer.param_groups for piece in group["params"]}
        for bucket in self.pieces.buckets:
            if any(self.pieces.of[slot.parameter] in stepped for slot in bucket.slots):
                self.sharded_model.renew(bucket)
        self.sharded_model.renewed()

    def reduced_parameters(self) -> set[torch.Tensor]:
        """Return the model's parameters whose gradients are reduced, and their pieces."""
        return {*self.pieces.of, *self.pieces.of.values()}

    def found_anywhere(self, flags: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Return what a gradient scaler found not finite, here or on another rank; every rank calls this together."""
        device = self._context.device
        worst = torch.stack([torch.zeros((), device=device), *(flag.to(device) for flag in flags.values())]).max()
        if self._context.collectives.ranks.world_size > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {device: worst}

    # Whole states, as the script's own checkpoints hold them.

    def state_dict_starts(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Copy whole weights before a state dict of the model, or of a part, which begins with those of its parts."""
        if self._nested == 0 and not keep_vars:
            with PULSE.meeting("state_dict"):
                own = set(module.parameters())
                # Weights that lie side by side in one storage are taken for tied ones by what writes safetensors.
                self._copies = self.sharded_model.copies(own) or {
                    parameter: parameter.detach().clone() for parameter in own if parameter in self.pieces.of
                }
        self._nested += 1

    def state_dict_ends(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put whole weights in the place of what the parameters show while they are sharded."""
        for name, parameter in own_parameters(module).items():
            if parameter in self._copies and prefix + name in state:
                state[prefix + name] = self._copies[parameter]
        self._nested -= 1
        if self._nested == 0:
            self._copies = {}

    def load_starts(self, *_: Any) -> None:
        """Make weights whole before the model loads a state dict; every rank calls this together."""
        with PULSE.meeting("load_state_dict"):
            self._loads.enter_context(self.sharded_model.whole(keeps_changes=True))

    def load_ends(self, *_: Any) -> None:
        """Make rank 0's weights everyone's when the model has loaded a state dict."""
        self._loads.close()

    def _whole_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict with whole tensors; every rank calls this together."""
        own = {index: dict(values) for index, values in state["state"].items()}
        with PULSE.meeting("optimizer.state_dict"):
            return {**state, "state": self._whole_states(optimizer, own)}

    def _whole_states(self, optimizer: torch.optim.Optimizer, own: dict[int, dict[str, Any]]) -> dict[int, Any]:
        shapes = [{index: _described(values) for index, values in own.items()}]
        world = self._context.collectives.ranks.world_size
        if world > 1:
            shapes = [{} for _ in range(world)]
            dist.all_gather_object(shapes, {index: _described(values) for index, values in own.items()})
        described = {index: names for rank in reversed(shapes) for index, names in rank.items()}
        whole: dict[int, Any] = {}
        for index, (bucket, slot) in enumerate(self._places(optimizer)):
            if index in described:
                whole[index] = {
                    name: self._whole_value(bucket, slot, own.get(index, {}).get(name), description)
                    for name, description in described[index].items()
                }
        return whole

    def _whole_value(self, bucket: Bucket | None, slot: Slot | None, value: Any, state: _Described) -> Any:
        if bucket is None or slot is None or not state.is_cut:
            return state.value if value is None else value
        numel, start = slot.parameter.numel(), bucket.own_start(slot)
        whole = torch.zeros(numel, dtype=state.dtype, device=self._context.device)
        if value is not None and value.numel():
            whole[start : start + value.numel()].copy_(value.reshape(-1))
        return self._context.collectives.all_reduce(whole).view(slot.parameter.shape)

    def _own_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of whole tensors with this rank's part of them."""
        own: dict[int, Any] = dict(state["state"])
        for index, (bucket, slot) in enumerate(self._places(optimizer)):
            if index not in own or bucket is None or slot is None:
                continue
            if not self.pieces.steps(slot.parameter):
                del own[index]
                continue
            piece = self.pieces.of[slot.parameter]
            own[index] = {
                name: value if name in SCALARS else cut(value, slot, bucket.own_start(slot), piece)
                for name, value in own[index].items()
            }
        return {**state, "state": own}

    def _places(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Bucket | None, Slot | None]]:
        """Yield where an optimizer's tensors lie, in the order of its state dict; nowhere for what is not ours."""
        places = {self.pieces.of[slot.parameter]: (bucket, slot) for bucket, slot in self.pieces.slots()}
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield places.get(tensor, (None, None))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Described:
    """A state of an optimizer as ranks describe it to each other."""

    is_cut: bool
    """True if each rank has a part of it."""
    dtype: torch.dtype | None
    """Of the parts."""
    value: Any
    """What is the same on every rank."""


def _described(values: Mapping[str, Any]) -> dict[str, _Described]:
    return {
        name: _Described(is_cut=True, dtype=value.dtype, value=None)
        if isinstance(value, torch.Tensor) and name not in SCALARS
        else _Described(is_cut=False, dtype=None, value=value)
        for name, value in values.items()
    }


def _settings(configuration: Configuration, device: torch.device) -> ZeroSettings:
    buckets = native_buckets(configuration.zero_stage, hidden_size=0, on_cpu=device.type == "cpu")
    return ZeroSettings(
        compute=None,
        master=None,
        accumulate=None,
        travel=GradientTravel(dtype=None, codec=None),
        bucket=buckets.reduce,
        persistence_threshold=buckets.persistence_threshold,
        offload=OffloadSettings(),
        scale=None,
    )


def _held_by(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Return those of `parameters` that some optimizer has."""
    held = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    return (parameter for parameter in parameters if parameter in held)


def tensors_in_output(output: Any) -> list[torch.Tensor]:
    """Return the tensors of what a model returned, in dataclasses too."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_in_output([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return tensors
