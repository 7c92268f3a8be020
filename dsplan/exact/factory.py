"""`--model package.module:factory`: the user's own code as the description of a model."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from planner.errors import DsplanError, UnknownName
from planner.models.facts import ModelFacts
from planner.models.resolve import is_factory, resolve_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Return of a factory: a module, a config or a dict, and beside a module maybe a batch of its inputs."""

    model: Any
    batch: Any = None


def any_model(name: str | None, *, model_size: str | None = None) -> ModelFacts:
    """As `resolve_model`, and what `package.module:factory` makes.

    Raises:
        DsplanError: as `model_and_product`.
    """
    return model_and_product(name, model_size=model_size)[0]


def model_and_product(name: str | None, *, model_size: str | None = None) -> tuple[ModelFacts, Product | None]:
    """Return the model's facts, and what a factory made where it comes from one.

    Raises:
        DsplanError: as `resolve_model`, `call_factory` and `facts_of_product`.
    """
    if name is None or model_size is not None or not is_factory(name):
        return resolve_model(name, model_size=model_size), None
    product = call_factory(name.strip())
    return facts_of_product(name.strip(), product), product


def call_factory(spec: str) -> Product:
    """Return what `package.module:factory` returns, called without arguments and, with torch, on the meta device.

    The working directory is searched first, as `python -m` does.

    Raises:
        DsplanError: the module or the name in it is missing, or the factory raised.
    """
    module_name, _, attribute = spec.partition(":")
    with _working_directory_first():
        factory = _attribute(_module(spec, module_name), attribute, spec)
        if not callable(factory):
            kind = type(factory).__name__
            raise DsplanError(f"{spec}: {attribute} is of type {kind}; name a function that returns a model")
        product = _call(spec, factory)
    if isinstance(product, tuple) and len(product) == 2 and hasattr(product[0], "named_parameters"):
        return Product(model=product[0], batch=product[1])
    return Product(model=product)


@contextlib.contextmanager
def _working_directory_first() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            remedy = "run from the directory that holds it, or install it"
        else:
            remedy = "pip install 'dsplan[train]'" if missing in ("torch", "transformers") else f"install {missing}"
        raise DsplanError(f"{spec}: there is no module {missing!r}; {remedy}") from error
    except Exception as error:
        raise DsplanError(f"{spec}: importing {name} raised {_one_line(error)}; mend it there") from error


def _attribute(module: ModuleType, path: str, spec: str) -> Any:
    value: Any = module
    before = f"{module.__name__}:"
    for name in path.split("."):
        if not hasattr(value, name):
            raise UnknownName("factory", spec, [before + member for member in _callables(value)])
        value, before = getattr(value, name), f"{before}{name}."
    return value


def _callables(holder: Any) -> list[str]:
    """Name what could be meant."""
    return [name for name in dir(holder) if not name.startswith("_") and callable(getattr(holder, name))]


def _call(spec: str, factory: Callable[[], Any]) -> Any:
    try:
        with _meta_device():
            return factory()
    except Exception as error:
        raise DsplanError(f"{spec}: the factory raised {_one_line(error)}; it is called without arguments") from error


def _meta_device() -> contextlib.AbstractContextManager[Any]:
    """Without torch a factory can still return a dict."""
    try:
        live = importlib.import_module("strategies.tracing.live")
    except ImportError:
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = live.meta_device()
    return device


def facts_of_product(spec: str, product: Product) -> ModelFacts:
    """Return the facts of what a factory made: an `nn.Module`, a transformers config, or a dict such as a config.json.

    Raises:
        DsplanError: it is something else, or a config that cannot be planned with.
    """
    from planner.models.from_hf.config import facts_from_config

    model = product.model
    if hasattr(model, "named_parameters"):
        from strategies.tracing.live import facts_from_module

        return facts_from_module(model, name=spec)
    if isinstance(model, Mapping):
        return facts_from_config(model, spec)
    if hasattr(model, "to_dict"):
        return facts_from_config(model.to_dict(), spec)
    raise DsplanError(
        f"{spec}: the factory returned a {type(model).__name__}; return an nn.Module, alone or as (module, batch), a"
        " transformers config, or a dict"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
