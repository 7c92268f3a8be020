"""Places of hooks: the callables of training libraries that dsplan replaces once their module has been imported.

A `Place` names a callable, such as `transformers.trainer:Trainer.__init__`, and the function that runs in its stead, as
`hook(original, *positional, **named)`. The module of the function, and with it everything heavy, is imported at the
first use of the callable, not before. A place of a `kind` claims the run for it (strategies/run_directory/claim.py):
its function runs only at the outermost use, inside `claim.use(kind)`; every other use goes straight to the original.
A function that does not claim, because more is known later, has `claims=False`; it then runs wherever the use might
have claimed. Without a name, the function is called with the module as soon as that was imported, for what cannot be
said by one callable; its own module must then be cheap to import.

    Place("transformers.trainer", "Trainer.__init__", "huggingface", "strategies.launch.hooks.huggingface:init")

Rows for more libraries go into PLACES. Whoever follows a plan or measures calls `claim.take_over(is_planned=...)`, as
`hooks.script_plan.watch` does.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from strategies.launch.hooks.patch import patch
from strategies.run_directory import claim
from strategies.run_directory.spec import ScriptKind
from strategies.torch_compat import FULLY_SHARD_MODULE

_HERE = "strategies.launch.hooks"
_DDP = "torch.nn.parallel.distributed"


@dataclass(frozen=True, slots=True)
class Place:
    """A callable of a library and the function that takes its place."""

    module: str
    """The module that defines the callable."""
    name: str
    """`function` or `Class.method`; empty: the function is called with the module, once it was imported."""
    kind: ScriptKind
    """Who claims the run at the outermost use."""
    hook: str
    """`module:function` of what runs instead."""
    claims: bool = True
    """Whether a use claims the run already."""
    overridden: bool = False
    """Whether the function also takes the place of a method that a subclass has of its own; it is called for both."""


PLACES: tuple[Place, ...] = (
    Place(
        "transformers.training_args",
        "TrainingArguments.__post_init__",
        "huggingface",
        f"{_HERE}.huggingface:settle",
        claims=False,
        overridden=True,
    ),
    Place("transformers.trainer", "Trainer.__init__", "huggingface", f"{_HERE}.huggingface:init"),
    Place("accelerate.accelerator", "Accelerator.__init__", "accelerate", f"{_HERE}.accelerate:init", claims=False),
    Place("accelerate.accelerator", "Accelerator.prepare", "accelerate", f"{_HERE}.accelerate:prepare", claims=False),
    Place("deepspeed", "initialize", "deepspeed", f"{_HERE}.deepspeed:initialize"),
    Place(_DDP, "DistributedDataParallel.__init__", "torch", f"{_HERE}.torch_ddp:wrap"),
    Place(FULLY_SHARD_MODULE, "fully_shard", "torch", f"{_HERE}.torch_ddp:shard"),
    Place(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel.__init__",
        "torch",
        f"{_HERE}.torch_ddp:shard_by_fsdp1",
    ),
    Place("torch.distributed.tensor.parallel.api", "parallelize_module", "torch", f"{_HERE}.torch_ddp:parallelize"),
    Place("lightning.pytorch.trainer.trainer", "Trainer.__init__", "lightning", f"{_HERE}.lightning:trainer"),
    Place("pytorch_lightning.trainer.trainer", "Trainer.__init__", "lightning", f"{_HERE}.lightning:trainer"),
    Place("lightning.fabric.fabric", "Fabric.__init__", "lightning", f"{_HERE}.lightning:fabric_"),
    Place("lightning_fabric.fabric", "Fabric.__init__", "lightning", f"{_HERE}.lightning:fabric_"),
    Place("torch.optim.optimizer", "", "plain", f"{_HERE}.observer:watch_steps"),
    Place("torch.autograd", "", "plain", f"{_HERE}.observer:watch_backward"),
)


def install(places: Iterable[Place] = PLACES) -> None:
    """Put the hooks into modules that are there, and into the others as they are imported."""
    waiting: dict[str, list[Place]] = {}
    for hooked in places:
        module = sys.modules.get(hooked.module)
        if module is not None and not _is_being_imported(module):
            _put(hooked, module)
        else:
            waiting.setdefault(hooked.module, []).append(hooked)
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: it has the loaders of the modules it waits for call it when they are done.

    Every other import costs one look into a dictionary.
    """

    def __init__(self, waiting: dict[str, list[Place]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        places = self._waiting.pop(fullname, None)
        if places is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the finders behind this one, which now knows the module no more
        load = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or load is None:
            self._waiting[fullname] = places  # it may be there at a later try
            return spec

        @functools.wraps(load)
        def load_and_put(module: ModuleType) -> None:
            # The loader itself stays in the spec, where others look for it by its type.
            del spec.loader.exec_module  # type: ignore[union-attr]
            load(module)
            for hooked in places:
                _put(hooked, module)

        spec.loader.exec_module = load_and_put  # type: ignore[union-attr,method-assign]
        return spec


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _put(hooked: Place, module: ModuleType) -> None:
    if not hooked.name:
        _function(hooked.hook)(module)
        return
    *path, last = hooked.name.split(".")
    owner: Any = functools.reduce(getattr, path, module)
    original = getattr(owner, last)
    patch(owner, last, _replacement(hooked, original))
    if hooked.overridden:
        _put_in_subclasses(hooked, owner, last)


def _put_in_subclasses(hooked: Place, owner: type[Any], name: str) -> None:
    """Put the hook into the subclasses that will be made."""
    before = vars(owner).get("__init_subclass__")

    def init_subclass(cls: type[Any], /, **named: Any) -> None:
        if before is None:
            super(owner, cls).__init_subclass__(**named)
        else:
            before.__func__(cls, **named)
        own = vars(cls).get(name)
        if own is not None:
            patch(cls, name, _replacement(hooked, own))

    patch(owner, "__init_subclass__", classmethod(init_subclass))


def _replacement(hooked: Place, original: Callable[..., Any]) -> Callable[..., Any]:
    hook: Callable[..., Any] | None = None

    @functools.wraps(original)
    def at_use(*positional: Any, **named: Any) -> Any:
        nonlocal hook
        if not claim.may_claim(hooked.kind):
            return original(*positional, **named)
        hook = hook or _function(hooked.hook)
        if not hooked.claims:
            return hook(original, *positional, **named)
        with claim.use(hooked.kind):
            return hook(original, *positional, **named)

    return at_use


def _function(named: str) -> Callable[..., Any]:
    module, _, name = named.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
