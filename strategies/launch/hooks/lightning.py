"""Lightning scripts: dsplan's strategy takes the place of the Trainer's or the Fabric's own.

The plan is made when training begins, in `dsplan.initialize` as for scripts that call it: the strategy hands it the
model, the optimizer and the training data. The ranks are started already, so the script's devices and nodes give way.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import torch

from strategies.integrations import fabric, lightning
from strategies.integrations.lightning_shared import FABRICS, EngineStrategy
from strategies.launch.hooks.script_plan import say_replaced
from strategies.run_directory.request import plan_request

_MACHINE = ("accelerator", "devices", "num_nodes")
"""What follows from how the ranks were started."""


def trainer(original: Callable[..., None], instance: Any, *positional: Any, **named: Any) -> None:
    """Run `Trainer.__init__` over dsplan's strategy."""
    library = _library(instance, "Trainer", FABRICS.keys())
    _start(original, instance, positional, named, library=FABRICS[library], kind=lightning.strategy_class(library))


def fabric_(original: Callable[..., None], instance: Any, *positional: Any, **named: Any) -> None:
    """Run `Fabric.__init__` over dsplan's strategy."""
    library = _library(instance, "Fabric", FABRICS.values())
    _start(original, instance, positional, named, library=library, kind=fabric.strategy_class(library))
    _launch_when_used(instance)


def _launch_when_used(instance: Any) -> None:
    """Launch a script that does not: it is meant for `fabric run`, whose ranks are started as these are."""
    validate = instance._validate_launched

    def launched() -> None:
        if not instance._launched:
            instance.launch()
        validate()

    instance._validate_launched = launched


def _start(
    original: Callable[..., None],
    instance: Any,
    positional: tuple[Any, ...],
    named: dict[str, Any],
    *,
    library: str,
    kind: Callable[..., Any],
) -> None:
    """Call `__init__` with what the script wrote, but for where and how the ranks train."""
    given = inspect.signature(original).bind(instance, *positional, **named).arguments
    given = {**given.pop("kwargs", {}), **{name: value for name, value in given.items() if name != "self"}}
    theirs = given.get("strategy", "auto")
    ours = theirs if isinstance(theirs, EngineStrategy) else kind(backend=plan_request().backend)
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    machine = {"accelerator": "cuda" if torch.cuda.is_available() else "cpu", "devices": here}
    machine["num_nodes"] = max(1, ranks // here)
    _say_replaced(given, theirs, ours, machine)
    plugins = given.get("plugins")
    if plugins is not None:
        environments = import_module(f"{library}.plugins.environments").ClusterEnvironment
        listed = plugins if isinstance(plugins, (list, tuple)) else [plugins]
        given["plugins"] = [plugin for plugin in listed if not isinstance(plugin, environments)]
    original(instance, **{**given, **machine, "strategy": ours})


def _say_replaced(given: dict[str, Any], theirs: Any, ours: Any, machine: dict[str, Any]) -> None:
    """Name what the script asked for in vain; "auto" asks for nothing."""
    written = {name: given[name] for name in _MACHINE if given.get(name, "auto") not in ("auto", -1, "-1", "gpu")}
    before, after = dict(written), {name: machine[name] for name in written}
    if theirs is not ours and theirs != "auto":
        before["strategy"] = theirs if isinstance(theirs, str) else type(theirs).__name__
        after["strategy"] = "the plan's"
    say_replaced(before, after)


def _library(instance: Any, name: str, libraries: Collection[str]) -> str:
    """Return the package whose class this object is of, maybe through a subclass of the script's."""
    modules = [base.__module__ for base in type(instance).__mro__ if base.__name__ == name]
    return next(library for library in libraries for module in modules if f"{module}.".startswith(f"{library}."))
