"""Checkpoints of DeepSpeed's ZeRO, in the same names as everyone's: each rank its runs of the fp32 masters.

Stages 1 and 2 lay parameters end to end and cut the whole; each parameter's `_hp_mapping` says which of its elements
lie in this rank's flat partition. Stage 3 cuts every parameter by itself; the pieces lie in flat sub-groups, at the
places that `grad_position` lists. Optimizer states are flat in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import Place, States
from strategies.errors import CannotRun
from strategies.torch_compat.tensors import tree_leaves

# A model's weights, whole, under DeepSpeed: to read, to generate with, or to change.


def state_tensors(model: nn.Module, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Return a rank's parameters, gradients and optimizer states, by the attributes of DeepSpeed's ZeRO optimizers."""
    parameters: list[Any] = list(model.parameters())

    def tensors_of(*names: str) -> list[torch.Tensor]:
        leaves = tree_leaves([getattr(optimizer, name, None) for name in names])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    own = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = tree_leaves([*optimizer.state.values()])
    return {
        "parameters": [*parameters, *model.buffers(), *shards, *tensors_of("bit16_groups_flat")],
        "gradients": [*own, *tensors_of("averaged_gradients", "grad_partitions_flat_buffer")],
        "optimizer": [
            *tensors_of("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
            *(leaf for leaf in states if isinstance(leaf, torch.Tensor)),
        ],
    }


@contextmanager
def whole(model: nn.Module, stage: int, *, keeps_changes: bool) -> Iterator[None]:
    """All weights whole inside; `keeps_changes` takes over what rank 0 wrote to them, in the fp32 masters as well."""
    zero: Any = import_module("deepspeed").zero
    parameters: list[Any] = list(model.parameters())
    changed: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
    with (
        _staying(parameters if stage == 3 else []),
        zero.GatheredParameters(parameters, modifier_rank=0 if keeps_changes else None, enabled=stage == 3),
    ):
        before = {parameter: parameter.detach().clone() for parameter in parameters if keeps_changes}
        yield
        for parameter, old in before.items():
            dist.broadcast(parameter.data, 0)
            if not torch.equal(parameter.data, old):
                changed[parameter] = (old, parameter.detach().clone())
    for parameter, (old, new) in changed.items():
        _change_master(parameter, old, new)


@contextmanager
def _staying(parameters: list[Any]) -> Iterator[None]:
    """Have parameters persist inside: stage 3 frees the weights of others after a module has run."""
    before = [parameter.ds_persist for parameter in parameters]
    for parameter in parameters:
        parameter.ds_persist = True
    try:
        yield
    finally:
        for parameter, persists in zip(parameters, before, strict=True):
            parameter.ds_persist = persists


def _change_master(parameter: nn.Parameter, old: torch.Tensor, new: torch.Tensor) -> None:
    """Change the elements of an fp32 master that changed in the weights; the others keep their bits."""
    utilities: Any = import_module("deepspeed.utils")
    master = utilities.safe_get_full_fp32_param(parameter)
    if master is not None:
        utilities.safe_set_full_fp32_param(parameter, torch.where(new == old, master, new.to(master.dtype)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A parameter's elements from `start` on this rank: `numel` of a flat master, from `offset`; maybe none."""

    flat: torch.Tensor
    group: int
    offset: int = 0
    numel: int = 0
    start: int = 0

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the run in a tensor that is laid out as the master is, [numel]."""
        return flat.detach().narrow(0, self.offset, self.numel)


class DeepSpeedStates(States):
    """A module under DeepSpeed's stages 1 to 3."""

    def __init__(self, module: nn.Module, zero: Any) -> None:
        super().__init__(module, zero.optimizer)
        self._zero = zero
        self._is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        self._runs: dict[torch.Tensor, Run] = dict(_split_runs(zero) if self._is_stage_3 else _cut_runs(zero))
        names = self.names.of_parameters()
        self._by_name = {names[parameter]: run for parameter, run in self._runs.items()}
        self._numbers: dict[tuple[int, str], Any] = {}

    def shape_of(self, tensor: torch.Tensor) -> torch.Size:
        """Return the whole shape of a parameter."""
        return torch.Size(getattr(tensor, "ds_shape", tensor.shape))

    def weight(self, tensor: torch.Tensor) -> Any:
        """Return this rank's part of a parameter, or the whole of what is not split."""
        shape = self.shape_of(tensor)
        if tensor in self._runs:
            run = self._runs[tensor]
            return PartOfTensor.of_run(run.of(run.flat), shape, run.start)
        if hasattr(tensor, "ds_tensor"):  # frozen, and split all the same
            start, numel = _own_elements(tensor)
            return PartOfTensor.of_run(tensor.ds_tensor.data.narrow(0, 0, numel), shape, start)
        return tensor.detach()

    def places(self) -> Iterator[Place]:
        """Yield where each parameter's master lies on this rank."""
        names = self.names.of_parameters()
        for parameter, run in self._runs.items():
            yield Place(
                name=names[parameter],
                group=self.optimizer.param_groups[run.group],
                tensor=run.of(run.flat),
                shape=self.shape_of(parameter),
                start=run.start,
            )

    def states_of(self, parameter: Place) -> Mapping[str, Any]:
        """Return the optimizer's states of a parameter's run."""
        run = self._run(parameter)
        if not run.numel:
            return {}
        states = self.optimizer.state.get(run.flat, {})
        return {key: run.of(value) if _is_like(value, run.flat) else value for key, value in states.items()}

    def room_for(self, parameter: Place, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the run of a state to read into, made where there is none."""
        run = self._run(parameter)
        if not run.numel:
            return torch.empty(0, dtype=dtype)
        states = self.optimizer.state[run.flat]
        if key not in states:
            states[key] = torch.zeros_like(run.flat, requires_grad=False)
        return run.of(states[key])

    def keep(self, parameter: Place, states: dict[str, Any]) -> None:
        """Keep numbers, one for all parameters of a flat tensor: the most stepped. Tensors were read in place."""
        run = self._run(parameter)
        if not run.numel:
            return
        flat_states = self.optimizer.state[run.flat]
        for key, value in list(flat_states.items()):
            if key not in states and _is_like(value, run.flat):
                run.of(value).zero_()
        for key, value in states.items():
            if not _is_like(flat_states.get(key), run.flat):
                most = self._numbers.get((id(run.flat), key), value)
                self._numbers[id(run.flat), key] = flat_states[key] = value if value > most else most

    def updated(self) -> None:
        """Bring the weights up to date with their masters."""
        zero = self._zero
        if not self._is_stage_3:
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()
        for index in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()

    def _run(self, parameter: Place) -> Run:
        return self._by_name[parameter.name]


def _cut_runs(zero: Any) -> Iterator[tuple[torch.Tensor, Run]]:
    """Yield the runs of stages 1 and 2."""
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    for index, parameters in enumerate(groups):
        flat = zero.optimizer.param_groups[index]["params"][0]
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield parameter, Run(flat=flat, group=index)
                continue
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield parameter, Run(flat=flat, group=index, offset=here.start, numel=here.numel, start=there.start)


def _split_runs(zero: Any) -> Iterator[tuple[torch.Tensor, Run]]:
    """Yield the runs of stage 3.

    Raises:
        CannotRun: DeepSpeed keeps them on NVMe.
    """
    if zero.swap_optimizer:
        raise CannotRun(
            "checkpoint: DeepSpeed keeps masters and optimizer states on NVMe, where dsplan does not read them; use"
            " backend 'native' with --offload nvme"
        )
    for index, parameters in enumerate(zero.fp16_groups):
        flat, group = zero.fp32_partitioned_groups_flat[index], zero.sub_group_to_group_id[index]
        for parameter in parameters:
            _, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            start, numel = _own_elements(parameter)
            yield parameter, Run(flat=flat, group=group, offset=offset, numel=numel, start=start)


def _own_elements(parameter: Any) -> tuple[int, int]:
    """Return the first element and the number of those of this rank's part of a parameter that stage 3 has split."""
    each = parameter.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * each, parameter.ds_numel)
    return start, min(each, parameter.ds_numel - start)


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def scale_of(scaler: Any) -> dict[str, Any]:
    """Return DeepSpeed's loss scale in the words of `strategies.modules.precision`; empty where it is fixed."""
    if not scaler.dynamic:
        return {}
    return {
        "scale": scaler.cur_scale,
        "_growth_tracker": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window,
        "overflows_left": scaler.cur_hysteresis,
    }


def take_scale(scaler: Any, state: Mapping[str, Any]) -> None:
    """Resume from a loss scale that some engine saved; nothing where fp16 is off on either side."""
    if not scaler.dynamic or "scale" not in state:
        return
    scaler.cur_scale = float(state["scale"])
    scaler.cur_iter, scaler.last_overflow_iter = int(state["_growth_tracker"]), -1
    scaler.cur_hysteresis = int(state.get("overflows_left", scaler.delayed_shift))
