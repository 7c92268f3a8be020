"""The engine of the strategies that need only torch: single, DDP and FSDP2."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from strategies.checkpoint.states import WholeStates, unwrapped
from strategies.distributed.gathers import require_alike
from strategies.engine.base import AccumulatingEngine, Strategy
from strategies.errors import CannotRun
from strategies.modules.activation_checkpointing import apply_plan
from strategies.modules.adapters import wide_adapters
from strategies.modules.precision import DTYPES, LossScale, cast_model, read_scale_settings, sum_squares
from strategies.optim.optimizers import OPTIMIZERS, ParameterMove, trainable_parameters
from strategies.parallel.mesh import Mesh
from strategies.parallel.pipeline import sum_shared
from strategies.parallel.split import ModelParts, parts_of
from strategies.parallel.whole import share_of_square, sum_copies
from strategies.protocols import Scheduler, TrainingParts
from strategies.run_directory.heartbeat import PULSE
from strategies.torch_compat.tensors import foreach_mul_, tree_leaves


def total_norm(module: nn.Module, mesh: Mesh | None = None) -> torch.Tensor:
    """Return the 2-norm of all gradients of a module in fp64, a scalar on their device; every rank calls it.

    Replicated gradients are the same on every rank already, and sharded ones share one device mesh. Where ranks of a
    `mesh` split the model between them, each of its elements counts once, whoever has it.

    Raises:
        Parted: the ranks' calls that gather weights have differed.
    """
    if mesh is not None and not mesh.is_data_parallel:
        return _norm_over(module, mesh)
    parameters = list(module.parameters())
    square = sum_squares(_values(parameters))
    sharded = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    if sharded is not None:
        met = torch.tensor(float(PULSE.number), dtype=torch.float64, device=sharded.device)
        sums, ranks = torch.stack((square.to(sharded.device), met)), 1
        for dimension, placement in enumerate(sharded.placements):
            if placement.is_shard():
                dist.all_reduce(sums, group=sharded.device_mesh.get_group(dimension))
                ranks *= sharded.device_mesh.size(dimension)
        square, total = sums.unbind()
        require_alike(total.item(), ranks)
    return square.sqrt()


def _norm_over(module: nn.Module, mesh: Mesh) -> torch.Tensor:
    """Sum over all ranks of a split model what each one's squares count; what is not finite on some is so on all."""
    parts, by_share = parts_of(module), dict[float, list[nn.Parameter]]()
    sharded: DTensor | None = None
    for name, parameter in module.named_parameters():
        shards = 1
        if isinstance(parameter, DTensor):
            sharded, sizes = parameter, zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in sizes if placement.is_shard())
        by_share.setdefault(share_of_square(unwrapped(name), parts, mesh, shards), []).append(parameter)
    device = mesh.environment.device
    squares = [sum_squares(_values(group), device).to(device) * share for share, group in by_share.items()]
    square = torch.stack([*squares, torch.zeros((), dtype=torch.float64, device=device)]).sum()
    dist.all_reduce(square)
    if sharded is not None:
        met = torch.tensor(float(PULSE.number), dtype=torch.float64, device=mesh.environment.device)
        dist.all_reduce(met, group=mesh.group("dp_shard_cp"))
        require_alike(met.item(), mesh.size("dp_shard_cp"))
    return square.sqrt()


def sum_terms(module: nn.Module, parts: ModelParts, mesh: Mesh) -> None:
    """Add up over tp, in one message, gradients of which ranks have terms; average those of experts left unreduced."""
    if parts.experts and mesh.size("expert_dp") > 1:
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            if unwrapped(name) in parts.experts and gradient is not None and not isinstance(gradient, DTensor):
                dist.all_reduce(gradient, group=mesh.group("expert_dp"))
                gradient.div_(mesh.size("expert_dp"))
    if mesh.size("tp") == 1:
        return
    gradients = [
        value
        for name, parameter in module.named_parameters()
        if unwrapped(name) in parts.summed
        for value in _values([parameter])
        if value.numel()
    ]
    if any(split.copies > 1 for split in parts.splits.values()):
        sum_copies(module, parts, mesh)
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh.group("tp"))
    for gradient, total in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by a factor, in place."""
    if factor != 1.0 and (values := _values(parameters)):
        foreach_mul_(values, factor)


class WideSums:
    """Gradients of earlier micro-batches, added up in fp32 where they are narrower, at 4 bytes per element."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take over the gradients of a backward pass that is not a step's last."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.dtype not in (torch.bfloat16, torch.float16):
                continue
            parameter.grad = None
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient.float()

    def give_back(self) -> None:
        """Make the sums, rounded once, the gradients that the step's last backward pass adds to, and reduces."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()


def make_wide_sums(dtype: str | None, parameters: Iterable[nn.Parameter]) -> WideSums | None:
    """Return sums in the dtype of `data_types.grad_accum_dtype`, or None if gradients have it anyway.

    Raises:
        CannotRun: it asks for a narrower dtype than that of the gradients.
    """
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if dtype is None or dtypes == {DTYPES[dtype]}:
        return None
    if dtype != "fp32":
        raise CannotRun(
            f"config: data_types.grad_accum_dtype is {dtype!r} and the gradients of this strategy are"
            f" {', '.join(sorted(str(each).removeprefix('torch.') for each in dtypes))}; leave it out, or use ZeRO"
        )
    return WideSums()


def _values(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return what this rank holds of every gradient: the shard, or the values of a sparse one."""
    values: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # The sum of repeated rows is what counts; it replaces them.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        values.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return values


class TorchStrategy(Strategy):
    """A strategy that wraps the module and leaves loss, optimizer and loop to `TorchEngine`."""

    def engine(self, parts: TrainingParts) -> TorchEngine:
        """Cast, checkpoint and wrap the model, and make its optimizer of what the wrapper trains."""
        parameters = trainable_parameters(parts.model, parts.model_parameters)
        move = ParameterMove(parts.model)
        chosen = self.configuration
        model = cast_model(parts.model, chosen.precision, wide_adapters(parts.model, chosen))
        apply_plan(parts)
        module = self.wrap(model)
        optimizer = self._optimizer(parts, move.parameters(model, parameters))
        if optimizer is parts.optimizer:
            move.optimizer(model, optimizer)
        return TorchEngine(strategy=self, wrapped=module, optimizer=optimizer, parts=parts)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Place a model on this rank's device and spread it over the ranks; its parameters keep their names."""

    def synchronization(self, module: nn.Module, *, reduces: bool) -> AbstractContextManager[object]:
        """Surround a forward pass, whose backward pass reduces gradients over the ranks or does not."""
        return nullcontext()

    @property
    def reduces_each_micro_batch(self) -> bool:
        """True if gradients are reduced before the accumulation boundary too, so that no rank keeps them whole."""
        return False

    def complete(self, module: nn.Module) -> None:
        """Reduce what the backward passes of a pipeline's step, all of them inside `synchronization`, have not."""

    @contextmanager
    def whole(self, module: nn.Module, *, keeps_changes: bool) -> Iterator[None]:
        """Have all weights whole inside; `keeps_changes` takes over what the first rank with each of them wrote."""
        yield
        if keeps_changes and self.environment.world_size > 1:
            experts = parts_of(module).experts
            for name, parameter in module.named_parameters():
                group = self.mesh.group("expert_dp" if unwrapped(name) in experts else "dp_cp")
                dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)

    def autocast(self) -> AbstractContextManager[object]:
        """Surround a forward pass with the casts of the plan's precision, unless the wrapper does them."""
        return nullcontext()

    def _optimizer(self, parts: TrainingParts, parameters: list[Any]) -> torch.optim.Optimizer:
        if isinstance(parts.optimizer, torch.optim.Optimizer):
            return parts.optimizer
        make = parts.optimizer or OPTIMIZERS[self.configuration.optimizer]
        return make(parameters)


class TorchEngine(AccumulatingEngine):
    """Runs a module that any torch strategy has wrapped."""

    def __init__(
        self, *, strategy: TorchStrategy, wrapped: nn.Module, optimizer: torch.optim.Optimizer, parts: TrainingParts
    ) -> None:
        settings = read_scale_settings(parts.script.fp16) if parts.plan.configuration.precision == "fp16" else None
        super().__init__(parts, strategy, LossScale(settings))
        self.strategy = strategy
        self.module = parts.model
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.lr_scheduler = scheduler_of(parts, optimizer)
        self._wide_sums = make_wide_sums(parts.script.accumulate_dtype, self.module.parameters())

    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the tensors of module and optimizer."""
        parameters = list(self.module.parameters())
        return {
            "parameters": [*parameters, *self.module.buffers()],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": tensors_in(self.optimizer.state),
        }

    def _whole_parameters(self, *, keeps_changes: bool) -> AbstractContextManager[object]:
        return self.strategy.whole(self.module, keeps_changes=keeps_changes)

    def _states(self) -> WholeStates:
        return WholeStates(self.module, self.optimizer)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        each = self.strategy.reduces_each_micro_batch and self._may_reduce
        reduces = each or self.is_gradient_accumulation_boundary()
        with self.strategy.synchronization(self.wrapped, reduces=reduces), self.strategy.autocast():
            return self.wrapped(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        self._add_gradients(self.scale_loss(loss), None, ends_step=self.is_gradient_accumulation_boundary())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Divide a loss by the accumulation steps, and multiply it by the loss scale and the weight of its samples."""
        mean = loss / self.configuration.gradient_accumulation_steps
        if self.sample_weight != 1:
            mean = mean * self.sample_weight
        return mean if self._scale.value == 1 else mean * self._scale.value

    def _add_gradients(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_step: bool
    ) -> None:
        self.backward_weights(lambda: torch.autograd.backward(output, gradient), ends_step=ends_step)

    def forward_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass that reduces nothing: others run before its backward, which alone knows what to reduce."""
        with self.strategy.synchronization(self.wrapped, reduces=False), self.strategy.autocast():
            return self.wrapped(*args, **kwargs)

    def backward_stage(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_stage: bool, ends_step: bool
    ) -> None:
        """Reduce at the end of a stage, or always where no rank keeps gradients whole."""
        reduces = ends_stage or self.strategy.reduces_each_micro_batch
        with self.strategy.synchronization(self.wrapped, reduces=reduces):
            self._add_gradients(output, gradient, ends_step=ends_step)

    def backward_weights(self, run: Callable[[], None], *, ends_step: bool) -> None:
        """Add up what `run` leaves in `.grad` with what earlier passes of the step left."""
        if self._wide_sums is not None and ends_step:
            self._wide_sums.give_back()
        run()
        if self._wide_sums is not None and not ends_step:
            self._wide_sums.set_aside(self.module.parameters())

    def complete_gradients(self) -> None:
        """Leave it to the strategy."""
        self.strategy.complete(self.wrapped)

    def _summed_norm(self) -> float:
        # The whole module, not the optimizer: parameters that it does not train have gradients too.
        parts = parts_of(self.module)
        sum_terms(self.module, parts, self.mesh)
        tied = {name: p for name, p in self.module.named_parameters() if name in parts.shared and p.grad is not None}
        sum_shared({parts.shared[name]: _values([parameter])[0] for name, parameter in tied.items()}, self.mesh)
        return total_norm(self.module, self.mesh).item()

    def _apply(self, factor: float) -> None:
        scale_gradients(self.module.parameters(), factor)
        self.optimizer.step()

    def _clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)


def tensors_in(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves([*state.values()]) if isinstance(leaf, torch.Tensor)]


def scheduler_of(parts: TrainingParts, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    """Return the script's scheduler, made from the optimizer where it is a function."""
    given = parts.lr_scheduler
    if given is None or isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return given
    return given(optimizer)
