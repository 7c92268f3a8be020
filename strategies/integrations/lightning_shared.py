"""The strategy that Lightning's Trainer and Fabric share: the ranks, the precision, the model, the engine, checkpoints.

Lightning is installed under two names with the same contents: `lightning` (with `lightning.pytorch` and
`lightning.fabric`) and `pytorch_lightning` (with `lightning_fabric`). Their classes are not each other's, so that each
has a strategy of its own, with the same code in front of the classes of its package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardware_db.notices import notice
from planner import vocabulary as words
from planner.types.plan import Plan
from strategies.config.read import read_config, read_object
from strategies.distributed.environment import Environment, join
from strategies.distributed.launcher_env import publish_process_variables, read_process_variables
from strategies.engine.base import Engine
from strategies.engine.initialize import initialize
from strategies.errors import BackendMissing, BrokenFile, CannotRun
from strategies.torch_compat.tensors import module_contents

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
"""The packages that have a Trainer."""
FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Where the Fabric of each is."""
_PRECISIONS: Mapping[str, words.Precision] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16-pure",
    "16-mixed": "fp16",
}
_SECTIONS: Mapping[words.Precision, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "bf16-pure": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}


def package_in_use() -> str:
    """Return the Lightning that the script has imported; if that is both or none, the first that is installed.

    Raises:
        BackendMissing: there is none.
    """
    for name in TRAINERS:
        if name in sys.modules:
            return name
    for name in TRAINERS:
        try:
            import_module(name)
        except ImportError as problem:
            if problem.name != name.partition(".")[0]:
                notice(f"{name} is installed and cannot be imported: {problem}")
            continue
        return name
    raise BackendMissing("Lightning is not installed; pip install dsplan[lightning]")


def cluster_environment(fabric: str) -> Any:
    """Return the ranks that a launcher has started, for Lightning; None where none has, so that Lightning does."""
    if not _is_started_from_outside():
        return None
    base = import_module(f"{fabric}.plugins.environments").ClusterEnvironment
    ranks = read_process_variables(os.environ)
    publish_process_variables(ranks, os.environ)
    address = ranks.meeting_point
    members = {
        "creates_processes_externally": property(lambda self: True),
        "main_address": property(lambda self: "127.0.0.1" if address is None else address.host),
        "main_port": property(lambda self: 0 if address is None else address.port),
        "detect": staticmethod(_is_started_from_outside),
        "world_size": lambda self: ranks.world_size,
        "set_world_size": lambda self, size: None,
        "global_rank": lambda self: ranks.rank,
        "set_global_rank": lambda self, rank: None,
        "local_rank": lambda self: ranks.local_rank,
        "node_rank": lambda self: ranks.rank // ranks.local_world_size,
    }
    return type("StartedRanks", (base,), members)()


def _is_started_from_outside() -> bool:
    """Return whether a launcher has said who this process is. Lightning's own, which sets no RANK, is none."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS", "PMI_RANK")
    return any(name in os.environ for name in names)


class EngineStrategy:
    """A strategy over dsplan's engine, for `ParallelStrategy` of one of the packages to stand behind."""

    accelerator: Any
    checkpoint_io: Any
    cluster_environment: Any
    parallel_devices: Any
    global_rank: int
    local_rank: int
    world_size: int
    is_distributed = True
    num_nodes = 1
    """The nodes that Lightning was asked for."""
    library: str
    """The package whose Trainer or Fabric this is for."""
    state_name: str
    """The library's part of a checkpoint's client_state."""
    saved_by: str
    """What writes checkpoints, for messages."""
    engine: Engine | None = None
    environment: Environment | None = None
    configured_clipping = 0.0
    """What gradients are clipped to unless the script chooses."""
    _launcher: Any
    _has_reduced = False
    """Whether a backward pass has reduced gradients since the last step."""

    def __init__(
        self,
        strategy: words.Strategy | None = None,
        backend: words.Backend | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        plan: Plan | str | Path | None = None,
    ) -> None:
        self._choice: dict[str, Any] = {"strategy": strategy, "backend": backend, "plan": plan}
        self._config = config
        self._plugin: Any = None
        environment = cluster_environment(FABRICS.get(self.library, self.library))
        super().__init__(cluster_environment=environment)  # type: ignore[call-arg]
        self._backward_sync_control = SimpleNamespace(no_backward_sync=self._no_backward_sync)

    @property
    def engine_precision(self) -> Any:
        """Lightning's word for the precision; the engine computes in it."""
        if self._plugin is None:
            self._plugin = self._make_plugin("32-true")
        return self._plugin

    @engine_precision.setter
    def engine_precision(self, given: Any) -> None:
        self._plugin = self._make_plugin(getattr(given, "precision", "32-true"))

    def _make_plugin(self, precision: str) -> Any:
        plugin = import_module(f"{self.library}.plugins.precision").Precision()
        plugin.precision = precision
        return plugin

    @property
    def num_processes(self) -> int:
        """The ranks on this node that Lightning was asked for."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices = self.parallel_devices
        if self.local_rank >= len(devices):
            raise CannotRun(
                f"Lightning was asked for devices={len(devices)} and this node runs more ranks; set devices= and"
                " num_nodes= to what the launcher starts"
            )
        device: torch.device = devices[self.local_rank]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of Lightning's sampler of each rank's samples."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """Let Lightning start the other ranks itself where no launcher has."""
        launchers = import_module(f"{self.library}.strategies.launchers")
        self._launcher = launchers._SubprocessScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def set_world_ranks(self) -> None:
        """Let Lightning know the rank before the first print."""
        here = self.cluster_environment
        here.set_global_rank(here.node_rank() * self.num_processes + here.local_rank())
        here.set_world_size(self.num_nodes * self.num_processes)
        import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Take the device and join the other ranks."""
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        if not _is_started_from_outside() and self.world_size > 1:
            here = self.cluster_environment
            os.environ.update(
                RANK=str(self.global_rank),
                WORLD_SIZE=str(self.world_size),
                LOCAL_RANK=str(self.local_rank),
                LOCAL_WORLD_SIZE=str(self.num_processes),
                MASTER_ADDR=str(here.main_address),
                MASTER_PORT=str(here.main_port),
            )
        self.environment = join()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self._has_peers():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on every rank."""
        if not self._has_peers():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean, sum, or another reduction over the ranks, in place; anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or not self._has_peers():
            return tensor
        word = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = word in ("mean", "avg", None)
        if is_mean:
            operation = dist.ReduceOp.SUM
        else:
            operation = getattr(dist.ReduceOp, word.upper()) if isinstance(word, str) else word
        here = tensor.contiguous()
        dist.all_reduce(here, op=operation, group=group)
        if is_mean:
            size = dist.get_world_size(group)
            here = here.div_(size) if here.is_floating_point() else here.div(size, rounding_mode="floor")
        return here

    def _place_whole(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Put a module that is not trained whole on every rank's device, with rank 0's weights."""
        module.to(self.root_device, dtype)
        if self._has_peers():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, 0)

    def _start_engine(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        *,
        micro_batch_size: int | None,
        accumulation: int = 1,
        clipping: float = 0.0,
    ) -> tuple[Engine, PlacedModule]:
        """Have the engine train a script's module with its optimizer; every rank calls this together."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise CannotRun(
                "LBFGS evaluates the loss several times a step, which no strategy of dsplan does; use another"
            )
        config = merge_config(
            self._config,
            precision=self.engine_precision.precision,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            clipping=clipping,
        )
        view = place(module)
        self.engine = engine = initialize(
            view, optimizer=optimizer, config=config, sample_data=_data_of(loader), **self._choice
        )[0]
        self.configured_clipping = engine.gradient_clipping
        if engine.configuration.is_uneven:
            raise CannotRun(
                "Lightning reads as many samples on every rank, and the plan has micro-batches of"
                f" {engine.configuration.micro_batches}; call dsplan.initialize in the script, or plan without node"
                " groups"
            )
        return engine, view

    def _require_engine(self) -> Engine:
        if self.engine is None:
            raise CannotRun("no model is set up for training; call fabric.setup(model, optimizer) before")
        return self.engine

    @contextmanager
    def block_backward_sync(self, enabled: bool = True) -> Iterator[None]:
        """Make backward passes inside, as in `optimizer.toggle_model(sync_grad=False)`, none that end their step."""
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(not enabled)
        try:
            yield
        finally:
            if self.engine is not None:
                self.engine.set_gradient_accumulation_boundary(True)

    def _no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Do what `fabric.no_backward_sync` asks for."""
        self._require_engine()
        return self.block_backward_sync(enabled)

    def _backward(self, loss: torch.Tensor, rest: Collection[object]) -> None:
        """Make the engine's backward pass of a loss that Lightning has divided already.

        Raises:
            CannotRun: gradients of an earlier pass would be lost, or the `rest` of the arguments holds any.
        """
        if rest:
            raise CannotRun("backward takes the loss alone: leave out retain_graph and other arguments")
        engine = self._require_engine()
        is_last = engine.is_gradient_accumulation_boundary()
        if self._has_reduced and engine.configuration.backend == "deepspeed":
            raise CannotRun(
                "DeepSpeed adds up gradients of several backward passes only where it knows which is a step's last: put"
                " the others into optimizer.toggle_model(sync_grad=False) or fabric.no_backward_sync(model), or use"
                " backend='native'"
            )
        engine.backward(loss * engine.configuration.gradient_accumulation_steps)
        if is_last:
            self._has_reduced = True
        else:
            engine.step()  # counts the micro-batch; Lightning steps once, at the end

    def _step(self) -> None:
        self._require_engine().step()
        self._has_reduced = False

    def _save(self, path: Any, own: Any) -> None:
        """Write a folder of dsplan's, which any strategy reads, with the library's `own` part."""
        engine = self._require_engine()
        state = {**engine.client_state, self.state_name: own}
        engine.save_checkpoint(Path(self.broadcast(str(path))), state, asynchronous=False, keep_last=1)

    def _load(self, path: Path) -> Mapping[str, Any]:
        """Load a folder of dsplan's into the engine and return its client_state.

        Raises:
            BrokenFile: it holds no checkpoint.
        """
        loaded, state = self._require_engine().load_checkpoint(path)
        self._require_checkpoint(path, loaded)
        return state

    def _require_checkpoint(self, path: Path, checkpoint: object) -> None:
        if checkpoint is None:
            raise BrokenFile(path, "holds no checkpoint", f"name what {self.saved_by} wrote")

    def _say(self, sentence: str) -> None:
        if self.global_rank == 0:
            notice(sentence, stream="stdout")

    def _has_peers(self) -> bool:
        return dist.is_initialized() and self.world_size > 1


class PlacedModule(nn.Module):
    """A script's module as the engine sees it: the same parameters, buffers and children under the same names.

    The strategies put their hooks, or `fully_shard`, on this module. The script's own stays as it is, so that its
    `training_step`, which runs inside the engine's forward pass, may call it like any other. `method` is what a forward
    pass runs; `ended` is called after it.
    """

    method: str
    ended: Callable[[], object]

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        own["_target"] = target  # beside the children: it is no part of its own module
        own.update(module_contents(target))
        own["method"], own["ended"] = "forward", _nothing
        self.training = target.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `method` of the script's module."""
        result = getattr(vars(self)["_target"], self.method)(*args, **kwargs)
        self.ended()
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_target"], name)

    def get_extra_state(self) -> Any:
        """Return that of the script's module."""
        return vars(self)["_target"].get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Hand it to the script's module."""
        vars(self)["_target"].set_extra_state(state)


def place(target: nn.Module) -> PlacedModule:
    """Return the engine's view of a module, under the name of its class."""
    members: dict[str, Any] = {}
    if type(target).get_extra_state is nn.Module.get_extra_state:
        # torch asks the class whether there is any.
        members = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    kind: type[PlacedModule] = type(type(target).__name__, (PlacedModule,), members)
    return kind(target)


def _nothing() -> None:
    return None


@contextmanager
def backward_inside(engine: Engine, view: PlacedModule) -> Iterator[None]:
    """Run a forward pass in which gradients are made, and reduced, before it returns."""
    wrapped = engine.wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        yield
        return
    view.ended = partial(setattr, wrapped, "require_backward_grad_sync", False)  # it has no backward pass to expect
    try:
        yield
    finally:
        view.ended, wrapped.require_backward_grad_sync = _nothing, True


def prepare_backward(engine: Engine) -> None:
    """Have DDP, which does so when a forward pass returns, expect gradients now."""
    wrapped = engine.wrapped
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.reducer.prepare_for_backward([])


def merge_config(
    config: Mapping[str, Any] | str | Path | None,
    *,
    precision: str,
    micro_batch_size: int | None,
    accumulation: int,
    clipping: float,
) -> dict[str, Any]:
    """Return the person's config with what Lightning's Trainer or Fabric was asked for.

    Raises:
        CannotRun: they contradict each other, or Lightning was asked for a precision that no strategy has.
    """
    given = read_object(Path(config)) if isinstance(config, (str, Path)) else dict(config or {})
    if precision not in _PRECISIONS:
        raise CannotRun(f"precision={precision!r} has no equal here; choose one of {', '.join(_PRECISIONS)}")
    wanted, named = _PRECISIONS[precision], read_config(given).precision
    if named not in (None, wanted):
        raise CannotRun(f"config: it asks for {named} and Lightning for precision={precision!r}; change one of them")
    steps = given.get("gradient_accumulation_steps", accumulation)
    if steps != accumulation:
        raise CannotRun(
            f"config: gradient_accumulation_steps is {steps} and Lightning accumulates {accumulation} batches; leave it"
            " out of the config"
        )
    own: dict[str, Any] = {} if named else dict(_SECTIONS[wanted])
    own["gradient_accumulation_steps"] = accumulation
    if micro_batch_size is not None:
        own["train_micro_batch_size_per_gpu"] = micro_batch_size
    if clipping or "gradient_clipping" not in given:
        own["gradient_clipping"] = clipping
    return {**own, **given, **{key: own[key] for key in ("gradient_clipping",) if clipping}}


def batch_size_of(loader: Any) -> int | None:
    """Return the samples of a rank's batch; None where a loader does not say."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _data_of(loader: Any) -> Any:
    """Return a loader's data, whose first sample a plan looks at; None where that would read on."""
    data = getattr(loader, "dataset", None)
    return data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else None


def whole_state(engine: Engine | None, module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict with whole weights on the CPU; every rank calls this together."""
    state = module.state_dict(keep_vars=True)  # FSDP2 reshards a module that is asked for it
    with nullcontext() if engine is None else engine.whole_parameters():
        tensors = _tensors(module)
        return {
            name: tensors.get(name, value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def load_whole(engine: Engine | None, module: nn.Module, weights: Mapping[str, Any], *, strict: bool) -> None:
    """Put whole weights into a module; every rank calls this together with the same.

    Raises:
        CannotRun: `strict`, and they are not those of the module.
    """
    if engine is None:
        module.load_state_dict(weights, strict=strict)
        return
    names = module.state_dict(keep_vars=True).keys()
    if strict and (stray := sorted(names ^ weights.keys())):
        where = "the checkpoint" if stray[0] in weights else "the module"
        raise CannotRun(
            f"{stray[0]} is in {where} alone; load weights of the same module, or set strict_loading = False"
        )
    with torch.no_grad(), engine.whole_parameters(keeps_changes=True):
        tensors = _tensors(module)
        for name in names & weights.keys():
            if name in tensors:
                tensors[name].copy_(weights[name])


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(module.named_buffers(remove_duplicate=False)), **dict(parameters)}


@cache
def class_for(library: str, face: type[EngineStrategy]) -> Any:
    """Return `face` over the `ParallelStrategy` of one package, under its public name."""
    base = import_module(f"{library}.strategies").ParallelStrategy
    members = {"library": library, "__doc__": face.__doc__, "__module__": face.__module__}
    return type(face.__name__.removeprefix("_"), (face, base), members)
