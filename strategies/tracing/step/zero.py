"""Our own ZeRO in a trace: its flat buckets, gradients on their way and stepped pieces, on fake tensors.

The engine itself (`strategies/backends/zero`) wants ranks that answer. Here is what one rank of it makes and frees in
the steady state, in the same order, between ranks that NCCL connects: `flat_shard.py` and `weights.py` for what is laid
out, `gradient_reducer.py` for gradients, `stages.py` and `unit_all_gather.py` for stage 3, `engine.py` for the step.

Buckets are padded to runs of one length, so that all ranks make the same up to the step. A run begins and ends inside
other parameters on each rank, though: optimizers make states and temporaries of other sizes, and the allocator blocks.

What offload keeps in host memory is made under the category `host`, which is not on the device: masters, states and the
step, sums of gradients as soon as they are copied down, and with `all` stage 3's sharded weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import nn

from planner.cost.precision import accumulates_in_fp32
from planner.cost.zero_bucket_sizes import NATIVE_STEP_RUNS, OffloadRatio, bucket_members, native_buckets
from planner.types.job import Job
from strategies.parallel.whole import Kind
from strategies.torch_compat.tensors import tree_leaves
from strategies.tracing.step.methods import make_optimizer
from strategies.tracing.step.storages import Storages

_ON_THE_WAY = 2
"""Buckets that are reduced at once, while a third fills."""
_MOST_RANKS = 15
"""Ranks beside rank 0 whose steps are traced, a choice: each takes as long as an update. Of more that differ they are
evenly spread, and the one that needs most may lie between."""
_Listener = Callable[[Sequence[nn.Parameter]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Properties of all buckets of a trace.

    `ranks` share them, `widens` says that masters are fp32 copies, `replaced` is called with parameters when they are
    views of a bucket. `takes` says of each bucket's elements if offload takes its states, `parts` if stage 3's sharded
    weights go with them.
    """

    ranks: int
    widens: bool
    replaced: _Listener
    storages: Storages
    takes: Callable[[int], bool]
    parts: bool


class _Bucket:
    """Parameters side by side; names as in `strategies.backends.zero.flat_shard.Bucket`, `keeps` that of `load`."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: _Layout, *, keeps: bool) -> None:
        self.parameters = parameters
        ranks, widens, self._storages = layout.ranks, layout.widens, layout.storages
        self._starts = list(accumulate((parameter.numel() for parameter in parameters), initial=0))
        self.elements = self._starts[-1]
        self.run = -(-self.elements // ranks)
        dtype = parameters[0].dtype
        # In the dtype the model was loaded in, and then in that of compute.
        original = torch.empty(self.run * ranks, dtype=torch.float32 if widens else dtype)
        self.whole = original.to(dtype)
        self.place()
        layout.replaced(parameters)
        self.part = self.whole[: self.run] if keeps else self.whole[: self.run].clone()
        self.master = original[: self.run].to(torch.float32, copy=True) if widens else self.part
        self.is_away = layout.takes(self.elements)
        if self.is_away:
            self._leave(with_part=layout.parts and not keeps)
        elif not keeps:
            self.part = self.master
        self.pieces: list[torch.Tensor] = []
        self.cut(0)
        self.gradient: torch.Tensor | None = None
        self.missing: set[nn.Parameter] = set()
        self._buffer: torch.Tensor | None = None

    def _leave(self, *, with_part: bool) -> None:
        """Have the master in host memory, and the sharded weights as well."""
        with self.where_states_are():
            is_alike = self.master.dtype == self.part.dtype
            self.master = self.master.clone()
            if with_part:
                self.part = self.master if is_alike else self.part.clone()

    def where_states_are(self) -> AbstractContextManager[object]:
        """Return the context in which masters, states and sums of gradients are made."""
        return self._storages.making("host") if self.is_away else nullcontext()

    def cut(self, rank: int) -> None:
        """Make the pieces those of a rank."""
        self._ranges = self.ranges(rank)
        self.pieces = [self.master[start:stop].detach().requires_grad_() for start, stop in self._ranges]

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return where in a rank's run each parameter begins and ends."""
        inside = [min(max(start - rank * self.run, 0), self.run) for start in self._starts]
        return list(pairwise(inside))

    def place(self) -> None:
        """Make the parameters views of the whole."""
        for parameter, start in zip(self.parameters, self._starts, strict=False):
            parameter.data = self.whole[start : start + parameter.numel()].view(parameter.shape)

    def empty(self) -> None:
        """Free the whole; the parameters keep their shapes."""
        nothing = self.whole.new_full((), torch.nan)
        for parameter in self.parameters:
            parameter.data = nothing.expand(parameter.shape)
        self.whole.untyped_storage().resize_(0)

    def fill(self) -> None:
        """All-gather the whole."""
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def take(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Put in a gradient, None for zeros; the only one of a bucket without padding becomes the buffer itself."""
        self.missing.discard(parameter)
        size = self.whole.numel()
        if len(self.parameters) == 1 and gradient is not None and gradient.numel() == size:
            self._buffer = gradient.reshape(-1).to(self.whole.dtype)
        elif self._buffer is None:
            self._buffer = torch.empty(size, dtype=self.whole.dtype)

    def emptied(self) -> torch.Tensor:
        """Release the full buffer and return it."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer

    def attach(self) -> None:
        """Give the pieces their gradients, in the master's dtype."""
        if self.gradient is None:
            return
        self.gradient = self.gradient.to(self.master.dtype)
        for piece, (start, stop) in zip(self.pieces, self._ranges, strict=True):
            piece.grad = self.gradient[start:stop]

    def detach(self) -> None:
        """Free the gradients."""
        self.gradient = None
        for piece in self.pieces:
            piece.grad = None


class _Unit:
    """A block, or what is in none, in stage 3: whole from when it is needed to when its use is over.

    `beside` is the stream that fetches weights from the host, None where they are on the device.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[_Bucket], beside: torch.cpu.Stream | None) -> None:
        self.module, self.buckets, self._beside = module, buckets, beside
        self.is_there, self.unmade = False, 0
        for bucket in buckets:
            bucket.empty()

    def begin(self) -> None:
        """Ask for the weights."""
        if self.is_there:
            return
        self.is_there = True
        with nullcontext() if self._beside is None else torch.cpu.stream(self._beside):
            for bucket in self.buckets:
                bucket.fill()

    def need(self) -> None:
        """Use the weights."""
        self.begin()
        for bucket in self.buckets:
            bucket.place()

    def release(self) -> None:
        """Free the weights."""
        if self.is_there:
            self.is_there = False
            for bucket in self.buckets:
                bucket.empty()


class NativeZero:
    """Stages 1 to 3 of backend `native` over a module whose weights are fake tensors; of rank 0 at first."""

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        storages: Storages,
        replaced: _Listener,
        kinds: Mapping[nn.Parameter, Kind],
    ) -> None:
        """Lay out the module's weights; `replaced` is called with those of each bucket when it has them.

        Parameters of different `kinds` lie in buckets of their own.
        """
        self._kinds = kinds
        self._configuration, self._storages = job.configuration, storages
        chosen = job.configuration
        self._sizes = native_buckets(chosen.zero_stage, hidden_size=job.facts.hidden_size, on_cpu=False)
        self._layout = _Layout(
            ranks=chosen.state_shards,
            widens=chosen.precision in ("bf16", "fp16"),
            replaced=replaced,
            storages=storages,
            takes=OffloadRatio(chosen.offload_ratio).takes if chosen.offload != "none" else lambda elements: False,
            parts=chosen.offload == "all",
        )
        self._accumulate = torch.float32 if accumulates_in_fp32(chosen) else None
        self._on_the_way: deque[tuple[_Bucket, torch.Tensor, torch.Tensor]] = deque()
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self._reduces, self._in_backward = True, False
        self._knows_order = False
        self._units: list[_Unit] = []
        self._buckets = self._laid_out(module, blocks)
        self._order, self._ready = self._buckets[::-1], list[_Bucket]()
        self._sent, self._has_adopted = 0, False
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._unit_of = {bucket: unit for unit in self._units for bucket in unit.buckets}
        self._optimizer = self._made_optimizer()

    def _made_optimizer(self) -> torch.optim.Optimizer:
        pieces: dict[nn.Parameter, Any] = {}
        for bucket in self._buckets:
            pieces |= zip(bucket.parameters, bucket.pieces, strict=True)
        in_turn = [pieces[parameter] for parameter in self._trained]
        return make_optimizer(self._configuration.optimizer, in_turn, on_cpu=False)

    def other_ranks(self) -> list[int]:
        """Return one rank for each set of pieces that rank 0 has not, at most `_MOST_RANKS`, from all over the job."""
        first: dict[Any, int] = {}
        for rank in range(self._configuration.state_shards):
            pieces = tuple(stop - start for bucket in self._buckets for start, stop in bucket.ranges(rank))
            first.setdefault(pieces, rank)
        others = list(first.values())[1:]
        return others if len(others) <= _MOST_RANKS else others[:: -(-len(others) // _MOST_RANKS)]

    def become(self, rank: int) -> None:
        """Have the pieces of another rank, and an optimizer of them without states."""
        for bucket in self._buckets:
            bucket.cut(rank)
        self._optimizer = self._made_optimizer()

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The sum that each bucket has on the device."""
        return [None if bucket.is_away else bucket.gradient for bucket in self._buckets]

    def _laid_out(self, module: nn.Module, blocks: Sequence[nn.Module]) -> list[_Bucket]:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self._configuration.zero_stage < 3:
            return self._bucketed(trained, keeps=True)
        limit = self._sizes.persistence_threshold
        kept = self._bucketed([parameter for parameter in trained if parameter.numel() <= limit], keeps=True)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        beside = torch.cpu.Stream() if self._layout.parts else None
        for unit in (module, *blocks):
            own = [p for p in unit.parameters() if p.requires_grad and (unit is not module or id(p) not in inside)]
            buckets = self._bucketed([parameter for parameter in own if parameter.numel() > limit], keeps=False)
            self._units.append(_Unit(unit, buckets, beside))
            unit.register_forward_pre_hook(self._before_forward, prepend=True)
            unit.register_forward_hook(self._after_forward, always_call=True)
        return kept + [bucket for unit in self._units for bucket in unit.buckets]

    def _bucketed(self, parameters: Sequence[nn.Parameter], *, keeps: bool) -> list[_Bucket]:
        buckets = []
        for group in self._alike(parameters):
            for members in bucket_members([parameter.numel() for parameter in group], self._sizes.reduce):
                buckets.append(_Bucket([group[index] for index in members], self._layout, keeps=keeps))
        return buckets

    def _alike(self, parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Yield the parameters that may share buckets."""
        for kind in dict.fromkeys(map(self._kinds.get, parameters)):
            of_kind = [parameter for parameter in parameters if self._kinds.get(parameter) == kind]
            for _, alike in groupby(of_kind, key=lambda parameter: parameter.dtype):
                yield list(alike)

    # Stage 3's weights.

    @property
    def has_learnt_order(self) -> bool:
        """True if passes differ from the first: stage 3 asks for units early, or buckets are sent in another order."""
        return bool(self._units) or self._order != self._buckets[::-1]

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        number = self._number(module)
        self._units[number].need()
        if self._knows_order and not self._in_backward and number + 1 < len(self._units):
            self._units[number + 1].begin()

    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._in_backward:
            return
        number = self._number(module)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(
            results, lambda _gradient: self._before_backward(number), mode="any"
        )
        if number:
            self._units[number].release()

    def _before_backward(self, number: int) -> None:
        self._units[number].need()
        if not number:
            return
        for later in self._units[number + 1 :]:
            later.release()
        if number > 1:
            self._units[number - 1].begin()

    def _number(self, module: nn.Module) -> int:
        return next(number for number, unit in enumerate(self._units) if unit.module is module)

    # Gradients.

    def begin(self, *, reduces: bool) -> None:
        """Prepare a backward pass, whose gradients are reduced or wait."""
        each = self._configuration.zero_stage > 1 and self._configuration.sync_each_micro_batch
        self._reduces, self._in_backward, self._knows_order = reduces or each, True, True
        self._sent = 0
        self._ready.clear()
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
        for unit in self._units:
            unit.unmade = len(unit.buckets)

    def take(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient of this backward pass, which is complete."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        with self._storages.making("gradients"):
            if self._reduces:
                self._hand_over(parameter, gradient)
            elif parameter not in self._waiting:
                self._waiting[parameter] = gradient.to(self._accumulate or gradient.dtype)

    def _hand_over(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        gradient = self._waiting.pop(parameter, gradient)
        bucket = self._bucket_of[parameter]
        bucket.take(parameter, gradient)
        if bucket.missing:
            return
        unit = self._unit_of.get(bucket)
        if unit is not None:
            unit.unmade -= 1
            if not unit.unmade:
                unit.release()
        self._ready.append(bucket)
        while self._sent < len(self._order) and not self._order[self._sent].missing:
            self._send(self._order[self._sent])
            self._sent += 1

    def _send(self, bucket: _Bucket) -> None:
        while len(self._on_the_way) >= _ON_THE_WAY:
            self._receive()
        buffer = bucket.emptied()
        if self._configuration.state_shards > 1:
            self._on_the_way.append((bucket, buffer.new_empty(bucket.run), buffer))
        else:
            self._on_the_way.append((bucket, buffer, buffer))

    def _receive(self) -> None:
        bucket, own, buffer = self._on_the_way.popleft()
        del buffer  # what NCCL holds it drops when it is waited for, before the sum takes a wider dtype
        with bucket.where_states_are():
            total = own.to(self._accumulate or bucket.whole.dtype, copy=bucket.is_away)
        bucket.gradient = total if bucket.gradient is None else bucket.gradient

    def finish(self) -> None:
        """Send what parameters without a gradient held back, and wait for what is on its way."""
        with self._storages.making("gradients"):
            for bucket in self._order if self._reduces else ():
                for parameter in [parameter for parameter in bucket.parameters if parameter in bucket.missing]:
                    self._hand_over(parameter, None)
            while self._on_the_way:
                self._receive()
        if self._reduces and not self._has_adopted:  # from now on in the order in which they were ready
            self._order, self._has_adopted = list(self._ready), True
        self._in_backward = False
        for unit in self._units:
            unit.release()

    # The step.

    def step(self) -> None:
        """Step the pieces, a part of them at a time where gradients must take the masters' dtype first."""
        for run in self._runs([bucket for bucket in self._buckets if not bucket.is_away]):
            self._step(run)
        for bucket in self._buckets:
            if bucket.is_away:
                self._step([bucket])

    def _step(self, run: Sequence[_Bucket]) -> None:
        with run[0].where_states_are():
            for bucket in run:
                bucket.attach()
            self._optimizer.step()
            for bucket in run:
                bucket.detach()

    def _runs(self, buckets: Sequence[_Bucket]) -> Iterator[Sequence[_Bucket]]:
        widens = any(b.gradient is not None and b.gradient.dtype != b.master.dtype for b in buckets)
        if not widens:
            yield from [buckets] if buckets else []
            return
        limit, run = sum(bucket.run for bucket in buckets) / NATIVE_STEP_RUNS, list[_Bucket]()
        for bucket in buckets:
            if run and sum(member.run for member in [*run, bucket]) > limit:
                yield run
                run = []
            run.append(bucket)
        yield run

    def stand_in(self) -> None:
        """Give every bucket a gradient, for a step that makes the optimizer's states."""
        for bucket in self._buckets:
            with bucket.where_states_are():
                bucket.gradient = torch.empty(bucket.run, dtype=self._accumulate or bucket.whole.dtype)

    def clear(self) -> None:
        """Forget all gradients, after a step."""
        self._waiting.clear()
        for bucket in self._buckets:
            bucket.gradient = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps the pieces."""
        return self._optimizer

    def masters(self) -> Iterable[torch.Tensor]:
        """Return the device's copies in the optimizer's dtype, beside the weights."""
        return (bucket.master for bucket in self._buckets if bucket.master is not bucket.part and not bucket.is_away)
