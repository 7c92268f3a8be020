"""Stand-in for `torch.nn.parallel.DistributedDataParallel` in a script that wraps its model in it.

The script's loop stays as it is: forward, `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`, `zero_grad`. Under
FSDP2 the model is sharded in place, and optimizers made before are pointed at the shards. Our own ZeRO waits for the
first forward pass that trains, because only by then the script has made its optimizers: `ScriptLoop` has the rest.
Results are those of DDP: gradients are means over ranks, the weights and buffers to start from are rank 0's, and
buffers follow rank 0's as DDP's do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner import vocabulary as words
from planner.types.plan import Configuration
from strategies.backends.fsdp import FullShard
from strategies.backends.zero.script_loop import ScriptLoop, tensors_in_output
from strategies.distributed.environment import join
from strategies.distributed.gathers import ModelHook
from strategies.distributed.rank_check import require_same_model
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from strategies.optim.optimizers import ParameterMove, refuse_optimizer, refuse_sparse_layers, sharded_like
from strategies.parallel.model import share_weights
from strategies.protocols import Observer
from strategies.run_directory.heartbeat import PULSE
from strategies.torch_compat import autograd as torch_autograd
from strategies.torch_compat.autograd import call_after_backward, replace_gradient_functions
from strategies.torch_compat.replacing import Undo
from strategies.torch_compat.tensors import live_objects, own_parameters, tree_map


def configuration_for(strategy: words.Strategy, world_size: int) -> Configuration:
    """Return a configuration of a strategy over all ranks, for a script with batches, precision, optimizer of its own.

    Raises:
        CannotRun: as many ranks cannot both shard and replicate.
    """
    replicas = world_size if strategy in ("single", "ddp") else 1
    if strategy == "hsdp":
        if world_size < 4 or world_size % 2:
            raise CannotRun(
                f"strategy 'hsdp' needs at least 4 ranks, in groups of equal size, and there are {world_size}"
            )
        replicas = 2
    return Configuration(
        strategy=strategy,
        backend="native" if strategy in words.ZERO_STAGES else "torch",
        dp_replicate=replicas,
        dp_shard=world_size // replicas,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        global_batch_size=world_size,
        sequence_length=1,
        precision="fp32",
        optimizer="adamw",
    )


class ScriptParallel(DistributedDataParallel):
    """A script's model under a strategy that shards it, with the interface of DDP.

    `observers` are called with what the script's loop does.
    """

    def __init__(
        self, module: nn.Module, *positional: Any, configuration: Configuration | None = None, **named: Any
    ) -> None:
        """Take DDP's arguments; `configuration` says the strategy, else that of the class does.

        Raises:
            CannotRun: an argument asks for what the strategy cannot do, or the strategy cannot train the model.
        """
        nn.Module.__init__(self)
        given = inspect.signature(DistributedDataParallel.__init__).bind(self, module, *positional, **named)
        given.apply_defaults()
        arguments = given.arguments
        chosen = configuration or getattr(type(self), "configuration", None)
        environment = join()
        self.configuration = chosen or configuration_for("zero3", environment.world_size)
        _refuse_arguments(arguments, self.configuration)
        device = next(module.parameters()).device
        self.environment = environment = replace(environment, device=device)
        self.module = module
        self.device_ids = arguments["device_ids"]
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.broadcast_buffers = arguments["broadcast_buffers"] is not False
        self._loop: ScriptLoop | None = None
        self._has_trained = False
        if self.configuration.strategy == "zero3" and _is_compiled(module):
            raise CannotRun(
                "strategy 'zero3' frees weights between uses, which a compiled model does not allow; leave"
                " torch.compile out, or use fsdp or zero2"
            )
        require_same_model(module)
        refuse_sparse_layers(module, self.configuration)
        share_weights(module, device)
        follow_script()
        if self.configuration.zero_stage == 0:
            self._shard()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; before the first pass that trains, our ZeRO divides it."""
        trains = torch.is_grad_enabled()
        if self.device_ids and self.environment.device.type == "cuda":
            args, kwargs = tree_map(self._here, (args, kwargs))
        self._follow_buffers(trains=trains)
        if trains and self.configuration.zero_stage and self._loop is None:
            self._begin_loop()
        reduces = self.require_backward_grad_sync
        if self._loop is None:
            if trains and isinstance(self.module, FSDPModule):
                if not self._has_trained:  # optimizers that were made after the model was wrapped
                    self._has_trained = True
                    for optimizer in optimizers_of(cast("nn.Module", self.module)):
                        give_whole_states(optimizer)
                self.module.set_requires_gradient_sync(reduces or self.configuration.sync_each_micro_batch)
            output = self.module(*args, **kwargs)
            if trains and isinstance(self.module, FSDPModule):
                _note_backward(output)
            return output
        if not trains:
            return self.module(*args, **kwargs)
        self._loop.forward_starts()
        output = self.module(*args, **kwargs)
        self._loop.forward_ended(output, reduces=reduces)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refuse: strategies reduce gradients themselves."""
        strategy = self.configuration.strategy
        raise CannotRun(f"strategy {strategy!r} reduces gradients itself and takes no hook of DDP's; use ddp")

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: every rank trains on as many batches."""
        raise CannotRun(f"strategy {self.configuration.strategy!r} cannot train on uneven inputs; use ddp")

    def _here(self, value: Any) -> Any:
        return value.to(self.environment.device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    def _follow_buffers(self, *, trains: bool) -> None:
        """Give all rank 0's buffers when DDP does it: before a forward pass that follows one with a reduction."""
        if self.broadcast_buffers and self.require_forward_param_sync and self.environment.world_size > 1:
            for alike in _by_dtype(self.module.buffers()):
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
                dist.broadcast(flat, 0)
                for buffer, values in zip(alike, torch.split(flat, [each.numel() for each in alike]), strict=True):
                    buffer.detach().copy_(values.view(buffer.shape))
        self.require_forward_param_sync = trains and self.require_backward_grad_sync

    def _shard(self) -> None:
        """Shard the model by FSDP2, and the optimizers that have its parameters."""
        module = self.module
        optimizers, move = optimizers_of(module), ParameterMove(module)
        for optimizer in optimizers:
            refuse_optimizer(optimizer, self.configuration)
        strategy = cast("FullShard", find_strategy(self.configuration, self.environment))
        strategy.wrap(module)
        for optimizer in optimizers:
            move.optimizer(module, optimizer)
            give_whole_states(optimizer)
        for part in module.modules():
            kept: Any = part  # its methods are annotated with hooks that return what they are given
            kept.register_state_dict_post_hook(ModelHook(_whole_shards))
            kept.register_load_state_dict_pre_hook(ModelHook(_as_shards))

    def _begin_loop(self) -> None:
        """Begin to train: the script's optimizers are there now, and our ZeRO can divide what they allow."""
        optimizers = optimizers_of(self.module)
        for optimizer in optimizers:
            refuse_optimizer(optimizer, self.configuration)
        loop = self._loop = ScriptLoop(self.module, self.configuration, self.environment, optimizers)
        _LOOPS.add(loop)
        kept: Any = self.module
        for part in kept.modules():
            part.register_state_dict_pre_hook(ModelHook(loop.state_dict_starts))
            part.register_state_dict_post_hook(ModelHook(loop.state_dict_ends))
        if self.configuration.zero_stage == 3:
            kept.register_load_state_dict_pre_hook(ModelHook(loop.load_starts))
            kept.register_load_state_dict_post_hook(ModelHook(loop.load_ends))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has wrapped a module or a part of it."""
    return any(type(part).__name__ == "OptimizedModule" for part in module.modules())


def _note_backward(output: Any) -> None:
    """Note the backward pass of what FSDP's forward pass has returned."""

    def begin(_: torch.Tensor) -> None:
        PULSE.enter("backward")
        call_after_backward(PULSE.leave)

    if results := [tensor for tensor in tensors_in_output(output) if tensor.requires_grad]:
        torch.autograd.graph.register_multi_grad_hook(results, begin, mode="any")


def _refuse_arguments(arguments: Mapping[str, Any], configuration: Configuration) -> None:
    """Refuse DDP's arguments that change what is trained, or over which ranks."""
    strategy, group = configuration.strategy, arguments["process_group"]
    if group is not None and group is not dist.group.WORLD:
        raise CannotRun(f"strategy {strategy!r} shards over all ranks, and DDP is given a process_group; use ddp")
    for name in ("device_mesh", "mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
        if arguments.get(name) is not None:
            raise CannotRun(f"strategy {strategy!r} has no equal of DDP's {name}; leave it out, or use ddp")
    if configuration.offload != "none":
        raise CannotRun(
            f"offload {configuration.offload!r} needs dsplan.initialize: a script that wraps its model in DDP steps on"
            " the device"
        )


def optimizers_of(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that hold a parameter of a module, in the order of their making."""
    own = set(module.parameters())
    # accelerate's and others' that stand around one of these have no parameters, states or hooks of their own.
    optimizers = [
        item
        for item in live_objects(torch.optim.Optimizer)
        if not isinstance(vars(item).get("optimizer"), torch.optim.Optimizer)
    ]
    return [each for each in optimizers if any(p in own for group in each.param_groups for p in group["params"])]


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _whole_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put whole tensors in the place of a module's own shards; every rank calls this together."""
    keys = [prefix + name for name, parameter in own_parameters(module).items() if isinstance(parameter, DTensor)]
    with PULSE.meeting("state_dict") if keys else nullcontext():
        state.update({key: _whole(state[key]) for key in keys if key in state})


def _as_shards(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put this rank's shards in the place of whole tensors."""
    for name, parameter in own_parameters(module).items():
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            state[prefix + name] = sharded_like(value, parameter)


def give_whole_states(optimizer: Any) -> None:
    """Have an optimizer shard the states that it has loaded whole, and give and take whole ones from now on."""
    if optimizer in _GIVES_WHOLE:
        return
    _GIVES_WHOLE.add(optimizer)
    for parameter, states in optimizer.state.items():
        states.update({name: _shard_of(value, parameter) for name, value in states.items()})
    optimizer.register_state_dict_post_hook(_whole_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(_optimizer_state_as_shards)


_GIVES_WHOLE: WeakSet[torch.optim.Optimizer] = WeakSet()


def _whole_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors; every rank calls this together."""
    with PULSE.meeting("optimizer.state_dict"):
        return {**state, "state": tree_map(_whole, state["state"])}


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _optimizer_state_as_shards(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of whole tensors with this rank's shards of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        index: {name: _shard_of(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": own}


def _shard_of(value: Any, parameter: torch.Tensor) -> Any:
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return sharded_like(value, parameter) if is_whole and isinstance(parameter, DTensor) and value.dim() else value


_LOOPS: WeakSet[ScriptLoop] = WeakSet()
_following: list[Undo] = []


def follow_script() -> None:
    """Have torch's clipping, loss scaling and optimizers know of gradients of which every rank has a part.

    Scripts that import these names later, or call them by their modules, get what is put here, once.
    """
    if not _following:
        replaced = replace_gradient_functions(
            clip_norm=_clip_norm_of_all, clip_value=_clip_value_of_pieces, unscale=_unscale_alike
        )
        _following.extend((replaced, register_optimizer_step_pre_hook(_before_any_step).remove))


def unfollow_script() -> None:
    """Give torch its own functions back."""
    while _following:
        _following.pop()()


@torch.no_grad()
def _clip_norm_of_all(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` by the norm over all ranks."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    loop = _loop_of(listed)
    if loop is None:
        norm = torch_autograd.clip_norm(listed, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    gradients = loop.gradients(listed)
    norm = loop.norm(gradients, float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is not finite, so they are not clipped"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def _clip_value_of_pieces(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Clip as `torch.nn.utils.clip_grad_value_` what this rank has of the gradients."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    loop = _loop_of(listed)
    if loop is None:
        torch_autograd.clip_value(listed, clip_value, foreach)
    else:
        for gradient in loop.gradients(listed):
            gradient.clamp_(-clip_value, clip_value)


def _unscale_alike(
    scaler: Any, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Return what torch's GradScaler saw in this rank's gradients, and the other ranks in theirs."""
    _before_any_step(optimizer, (), {})
    overflows = torch_autograd.unscale_gradients(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    loop = next((loop for loop in _LOOPS if optimizer in loop.pieces.optimizers), None)
    return overflows if loop is None else loop.found_anywhere(overflows)


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Have an optimizer that the script made after its first forward pass step pieces too."""
    for loop in _LOOPS:
        if loop.holds(optimizer):
            loop.adopt(optimizer)


def _loop_of(parameters: Iterable[torch.Tensor]) -> ScriptLoop | None:
    """Return the loop whose model has some of these parameters, or pieces of them.

    Raises:
        CannotRun: some with a gradient are not of this model.
    """
    listed = list(parameters)
    for loop in _LOOPS:
        own = loop.reduced_parameters()
        others = [parameter for parameter in listed if parameter not in own]
        if len(others) == len(listed):
            continue
        if any(parameter.grad is not None for parameter in others):
            raise CannotRun("gradients of several models are clipped together; clip those of each model by themselves")
        return loop
    return None


def observe(module: nn.Module, observer: Observer) -> Callable[[], None]:
    """Call an observer with what a script's loop does; what is returned ends that.

    It sees forward passes that train, the losses that `module` returns, and the steps of the first optimizer that steps
    its parameters.
    """
    optimizers: list[int] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            observer.forward_starts(module, (args, kwargs))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            losses = [leaf for leaf in tensors_in_output(output) if leaf.dim() == 0 and leaf.is_floating_point()]
            if losses:
                observer.loss_is(losses[0])

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not optimizers and _steps(optimizer, module):
            optimizers.append(id(optimizer))
        if id(optimizer) in optimizers:
            observer.step_ended()

    handles = (
        module.register_forward_pre_hook(ModelHook(before), with_kwargs=True),
        module.register_forward_hook(ModelHook(after)),
        register_optimizer_step_post_hook(stepped),
    )

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def _steps(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    own = set(module.parameters())
    loops = [loop for loop in _LOOPS if optimizer in loop.pieces.optimizers]
    return bool(loops) or any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
