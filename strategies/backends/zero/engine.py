"""The engine of our ZeRO: what its three stages have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge

from planner.cost.zero_bucket_sizes import NATIVE_STEP_RUNS
from strategies.backends.zero.collectives import collectives_for, collectives_over
from strategies.backends.zero.compress import collectives_factory
from strategies.backends.zero.flat_shard import Bucket, Place, Ranks, owners_of
from strategies.backends.zero.gradient_reducer import Reducer
from strategies.backends.zero.nvme import Disk
from strategies.backends.zero.offload import HostGradients, fused_on_host, offload_of
from strategies.backends.zero.optimizer import Pieces, script_optimizer
from strategies.backends.zero.settings import read_settings
from strategies.backends.zero.sharded_model import ShardedModel, ZeroStates
from strategies.backends.zero.weights import ShardingContext
from strategies.checkpoint.states import unwrapped
from strategies.distributed.environment import ensure_group
from strategies.distributed.gathers import ModelHook
from strategies.engine.base import AccumulatingEngine, Strategy
from strategies.engine.torch_engine import scheduler_of, tensors_in
from strategies.errors import CannotRun
from strategies.modules.activation_checkpointing import apply_plan
from strategies.modules.precision import LossScale, narrow_inputs
from strategies.optim.optimizers import select_undivided, trainable_parameters
from strategies.parallel.pipeline import sum_shared
from strategies.parallel.ranks import TensorRanks
from strategies.parallel.split import parts_of
from strategies.parallel.whole import Kind, kinds_of, sum_over_copies
from strategies.protocols import TrainingParts

# Parameters that are unfrozen, or added to the optimizer, after the engine was made.


class Latecomers:
    """Finds them before a backward pass and has them trained from it on, as plain torch does.

    A parameter joins when it requires gradients and the optimizer holds it, whichever comes last. Every rank must make
    the same changes.
    """

    def __init__(self, module: nn.Module, sharded_model: ShardedModel, pieces: Pieces, reducer: Reducer) -> None:
        self._module, self._sharded_model, self._pieces, self._reducer = module, sharded_model, pieces, reducer
        self._asleep = self._outside()

    def welcome(self) -> None:
        """Train those that have come since the last call; costs a look at the frozen parameters where none has.

        Raises:
            CannotRun: one has a gradient of its rank alone, or must be stepped whole and is divided.
        """
        if self._pieces.has_grown:
            self._asleep = self._outside()
        elif not any(parameter.requires_grad for _, parameter in self._asleep):
            return
        stepped = {tensor for group in self._pieces.groups() for tensor in group["params"]}
        come = [
            (n, p) for n, p in self._asleep if p.requires_grad and (p in stepped or self._pieces.of.get(p) in stepped)
        ]
        for name, parameter in come:
            if parameter.grad is not None:
                raise CannotRun(
                    f"{name} has a gradient that was not summed over ranks; have it in the optimizer before the first"
                    " backward pass of a step that makes one"
                )
        whole = [p for each in self._pieces.optimizers for p in select_undivided(each, (p for _, p in come))]
        owners = owners_in(self._sharded_model.context, whole)
        buckets = self._sharded_model.admit(come, owners)
        self._reducer.take(buckets)
        self._pieces.add(buckets)
        self._asleep = self._outside()

    def _outside(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the model whose gradients are not summed."""
        return [(name, p) for name, p in self._module.named_parameters() if not self._reducer.sums(p)]


# The step updates master weights and copies them to the weights, in groups of buckets.


class Renewing(Protocol):
    """Updater of weights."""

    def renew(self, bucket: Bucket) -> None:
        """Begin to bring a bucket's weights up to date on every rank with its master, which has changed."""

    def renewed(self) -> None:
        """Wait for the weights, when all masters have changed."""


class Stepper:
    """One step of the optimizer; `disk` has the states of the buckets that are there."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Pieces, weights: Renewing, disk: Disk | None) -> None:
        self._optimizer, self._pieces, self._weights, self._disk = optimizer, pieces, weights, disk

    def step(self, used: set[nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the parameters that any rank used by `factor`, and step with them."""
        before = [_options(group) for group in self._optimizer.param_groups]
        for group in self._groups():
            # A count of steps that a group of parameters keeps goes up once in a step, however many parts that has.
            for options, saved in zip(self._optimizer.param_groups, before, strict=True):
                options.update(saved)
            self._advance(group, used, factor)
            for bucket in group:
                self._weights.renew(bucket)
        self._weights.renewed()

    def _groups(self) -> Iterator[Sequence[Bucket]]:
        """Yield the device's buckets first, since it steps them while the host continues with its own."""
        at = {home: [bucket for bucket in self._pieces.buckets if bucket.states_at is home] for home in Place}
        yield from self._runs(at[Place.DEVICE])
        yield from ([bucket] for bucket in at[Place.HOST])
        if self._disk is not None:
            yield from ([bucket] for bucket in self._disk.visited(at[Place.DISK], self._pieces, self._optimizer))

    def _runs(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """Yield the device's buckets at once, or in runs where gradients must take the masters' wider dtype first.

        A rank has room for few of them in that. Optimizers of whole tensors may look at all of them together.
        """
        widens = any(member.gradient is not None and member.gradient.dtype != member.master.dtype for member in buckets)
        if not widens or not all(bucket.is_divided for bucket in buckets):
            yield from [buckets] if buckets else []
            return
        limit, run = sum(bucket.master.numel() for bucket in buckets) / NATIVE_STEP_RUNS, list[Bucket]()
        for bucket in buckets:
            if run and sum(member.master.numel() for member in [*run, bucket]) > limit:
                yield run
                run = []
            run.append(bucket)
        yield run

    def _advance(self, group: Sequence[Bucket], used: set[nn.Parameter], factor: float) -> None:
        is_away = group[0].states_at is not Place.DEVICE
        with torch.profiler.record_function("dsplan::step_on_host" if is_away else "dsplan::step"):
            self._pieces.attach(group, used, factor)
            with fused_on_host(self._optimizer) if is_away else nullcontext():
                self._optimizer.step()
            self._pieces.detach(group)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class ZeroStrategy(Strategy):
    """Lays the model out in buckets; a stage says which of them are unsharded and when gradients are reduced."""

    reduces_each_micro_batch: bool
    """True if gradients are summed over ranks in every micro-batch, so that no rank holds them whole."""

    def engine(self, parts: TrainingParts) -> ZeroEngine:
        """Make the engine over the stage's sharded model."""
        ensure_group(self.environment)
        environment, model = self.environment, parts.model
        apply_plan(parts)
        mesh, parted = self.mesh, parts_of(model)
        collectives = collectives_over("dp_shard_cp", mesh)
        experts = collectives_over("expert_shard", mesh) if parted.experts else None
        optimizer = script_optimizer(parts, trainable_parameters(model, parts.model_parameters))
        settings = read_settings(parts, environment.device)
        copies = mesh.size("dp_replicate") > 1
        named = [(unwrapped(name), parameter) for name, parameter in model.named_parameters()]
        kinds = {} if mesh.is_data_parallel and not copies else kinds_of(named, parted, mesh)
        context = ShardingContext(
            device=environment.device,
            collectives=collectives,
            settings=settings,
            offload=offload_of(settings.offload, environment.device),
            kinds=kinds,
            experts=experts,
            replicas=collectives_over("dp_replicate", mesh) if copies else None,
            everyone=collectives_over("dp_cp", mesh) if copies else None,
            all_experts=collectives_over("expert_dp", mesh) if copies and parted.experts else None,
        )
        context = replace(context, owners=owners_in(context, select_undivided(optimizer, model.parameters())))
        return ZeroEngine(
            strategy=self,
            parts=parts,
            context=context,
            sharded_model=self.shard_model(model, context),
            optimizer=optimizer,
        )

    @abstractmethod
    def shard_model(self, model: nn.Module, context: ShardingContext) -> ShardedModel:
        """Place the model's weights in buckets on the device."""


def owners_in(context: ShardingContext, undivided: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return which of the ranks that share its states owns each parameter that must not be divided."""
    whole = list(undivided)
    return {
        parameter: owner
        for are_experts in (False, True)
        for parameter, owner in owners_of(
            [parameter for parameter in whole if context.kind_of(parameter).is_expert is are_experts],
            context.collectives_of(Kind(is_expert=are_experts)).ranks.world_size,
        ).items()
    }


class ZeroEngine(AccumulatingEngine):
    """Runs a module whose weights are in buckets, the same way in every stage."""

    def __init__(
        self,
        *,
        strategy: ZeroStrategy,
        parts: TrainingParts,
        context: ShardingContext,
        sharded_model: ShardedModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        settings = context.settings
        super().__init__(parts, strategy, LossScale(settings.scale))
        self.module = self.wrapped = parts.model
        self._context, self._sharded_model = context, sharded_model
        data_parallel = context.everyone or context.collectives
        collectives_of = collectives_factory(
            lambda bucket: context.collectives_of(bucket.kind), settings.travel.codec, lambda: self._scale.value
        )
        self._reducer = Reducer(
            sharded_model.trained,
            collectives_of,
            accumulate=settings.accumulate,
            reduce=settings.travel.dtype,
            group=data_parallel.group,
            replicas=None if context.replicas is None else context.replicas.group,
        )
        sharded_model.follow(self._reducer)
        # A script may keep the model and the optimizer alone; parameters' hooks do not hold what they report to.
        held: Any = parts.model
        held._dsplan_engine = ModelHook(self.backward)
        self.optimizer = optimizer
        world = Ranks(rank=self.environment.rank, world_size=self.environment.world_size)
        everyone = None if self.mesh.is_data_parallel else collectives_for(world, self.device)
        self._pieces = Pieces(sharded_model.trained, data_parallel, [optimizer], everyone)
        self._latecomers = Latecomers(self.module, sharded_model, self._pieces, self._reducer)
        self._stepper = Stepper(optimizer, self._pieces, sharded_model, context.offload.disk)
        if context.offload.copies is not None:
            rounds = self.device.type == "cuda"
            self._reducer.host = HostGradients(context.offload.copies, settings, rounds=rounds)
        self.lr_scheduler = scheduler_of(parts, self.optimizer)
        each = strategy.reduces_each_micro_batch and self.configuration.sync_each_micro_batch
        self._reduces_each = each
        self._used: set[nn.Parameter] = set()

    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the rank's tensors by what they are."""
        buckets = (*self._sharded_model.trained, *self._sharded_model.fixed)
        reduced = [bucket.gradient for bucket in buckets if bucket.gradient is not None]
        masters = [bucket.master for bucket in self._sharded_model.trained]
        # A part that is its own master holds weights where both have one dtype, else the wider copy.
        parts = [bucket.part for bucket in buckets if bucket.part.dtype == bucket.dtype]
        return {
            "parameters": [*parts, *self.module.parameters(), *self.module.buffers()],
            "gradients": [*reduced, *self._reducer.waiting],
            "optimizer": [*masters, *tensors_in(self.optimizer.state)],
        }

    def _whole_parameters(self, *, keeps_changes: bool) -> AbstractContextManager[object]:
        return self._sharded_model.whole(keeps_changes=keeps_changes)

    def _states(self) -> ZeroStates:
        return ZeroStates(self.module, self.optimizer, self._pieces, self._sharded_model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = narrow_inputs((args, kwargs), self._context.settings.compute)
        return self.module(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        self._add_gradients(self.scale_loss(loss), None, ends_step=self.is_gradient_accumulation_boundary())

    def forward_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pipeline stage's forward pass."""
        return self._forward(*args, **kwargs)

    def backward_stage(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_stage: bool, ends_step: bool
    ) -> None:
        """Run a pipeline stage's backward pass, and reduce gradients as the stage does."""
        self._add_gradients(output, gradient, ends_step=ends_step)

    def backward_weights(self, run: Callable[[], None], *, ends_step: bool) -> None:
        """Run the half of a stage's backward pass that makes gradients of weights."""
        self._latecomers.welcome()
        self._reducer.begin(reduces=self._reduces(ends_step=ends_step), ends_step=ends_step)
        run()
        self._reducer.take_gradients()
        self._reducer.finish()

    def complete_gradients(self) -> None:
        """Do nothing: the step's last backward pass has reduced what was waiting."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of which the gradients' sums are means."""
        # Divided here once, gradients are means over ranks and micro-batches when they have been added up.
        parts = self.configuration.gradient_accumulation_steps * self.mesh.size("dp_cp")
        return loss.float() * (self._scale.value * self.sample_weight / parts)

    def _reduces(self, *, ends_step: bool) -> bool:
        return ends_step or (self._reduces_each and self._may_reduce)

    def _add_gradients(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_step: bool
    ) -> None:
        self._latecomers.welcome()
        self._reducer.begin(reduces=self._reduces(ends_step=ends_step), ends_step=ends_step)
        with self._sharded_model.backward():
            torch.autograd.backward(output, gradient)
            self._reducer.finish()

    def _summed_norm(self) -> float:
        self._latecomers.welcome()
        self._reducer.settle()
        if not self.mesh.is_data_parallel:
            self._sum_terms()
        square, self._used = self._pieces.synchronize(self._reducer.used, self.device)
        return math.sqrt(square)

    def _sum_terms(self) -> None:
        """Add up the gradients of which tp ranks have a term each, and those of weights that two stages have.

        What is summed lies in buckets of its own, which are cut alike on all of these ranks.
        """
        parts, shared = parts_of(self.module), dict[str, torch.Tensor]()
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket in self._sharded_model.trained:
            kind, gradient, name = bucket.kind, bucket.gradient, unwrapped(bucket.slots[0].name)
            if gradient is None or not (kind.is_summed or kind.copies > 1 or kind.shared):
                continue
            here = gradient.to(self.device)  # it may be in host memory
            held.append((gradient, here))
            if kind.is_summed:
                dist.all_reduce(here, group=self.mesh.group("tp"))
            if kind.copies > 1:
                here.copy_(sum_over_copies(here, parts.splits[name], TensorRanks(self.mesh.group("tp"))))
            if kind.shared:
                shared[f"{kind.shared} {len(shared)}"] = here
        sum_shared(shared, self.mesh)
        for gradient, here in held:
            if here is not gradient:
                gradient.copy_(here)

    def _apply(self, factor: float) -> None:
        self._stepper.step(self._used, factor)

    def _clear_gradients(self) -> None:
        self._reducer.clear()
        self._pieces.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
