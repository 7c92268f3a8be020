"""The source of the module to trace, known well enough to find its earlier traces without torch."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dsplan.exact.cache import TraceCache, trace_versions
from dsplan.exact.factory import Product, call_factory, facts_of_product
from hardware_db.files import digest
from hardware_db.from_json import from_json
from hardware_db.handed_in import read_json
from hardware_db.measurement import trace_key, trace_record
from planner.models.facts import ModelFacts
from planner.models.resolve import config_file, is_factory, resolve_model
from planner.vocabulary import Task

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def source_files(modules: Collection[str]) -> dict[str, str]:
    """Path and SHA-256 of the files of loaded modules, and of the user's own modules that these use in turn.

    What an installed package uses is left out: its version speaks for it.
    """
    waiting, seen, files = list(modules), set[str](), dict[str, str]()
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in seen or path is None:
            continue
        seen.add(name)
        if _is_own(path):
            waiting += _used_by(sys.modules[name])
        if _is_own(path) or name in modules:
            files[path] = _digest(path)
    return files


def unchanged(files: Mapping[str, str]) -> bool:
    """Return whether every file still has its contents."""
    return all(_digest(path) == digest for path, digest in files.items())


def _is_own(path: str) -> bool:
    return not path.startswith(_INSTALLED) and not _PACKAGES & set(Path(path).parts)


def _used_by(module: ModuleType) -> set[str]:
    """Return the modules that a module's names are or come from."""
    names = [
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in list(vars(module).values())
    ]
    return {name for name in names if isinstance(name, str)}


def _digest(path: str) -> str:
    """Return the hash of a file's contents; empty where it cannot be read, which equals no file's."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


# Names and remarks do not change what is built.
_NOT_BUILT = ("name", "aliases", "note", "splits_sequences", "traced")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model as facts, and where it is built from.

    From the facts alone, a `config` (parsed JSON) or a `factory` (`package.module:function`).
    `identity` is what the module depends on, as JSON; `work` the task and the length of a sample that a factory's batch
    shows.
    """

    facts: ModelFacts
    config: Mapping[str, Any] = field(default_factory=dict)
    factory: str = ""
    identity: Mapping[str, object]
    work: tuple[Task | None, int | None] = (None, None)


def model_source(name: str | None, model_size: str | None, cache: TraceCache) -> ModelSource:
    """Return the source of what `--model` or `--model-size` names.

    Raises:
        DsplanError: as `resolve_model`.
    """
    if name is not None and model_size is None:
        file = config_file(name)
        if file is not None:
            facts = resolve_model(name)
            config = read_json(file, "name the model's config.json")
            return ModelSource(facts=facts, config=config, identity={"facts": facts_identity(facts), "config": config})
        if is_factory(name):
            return factory_source(name.strip(), cache)
    facts = resolve_model(name, model_size=model_size)
    return ModelSource(facts=facts, identity={"facts": facts_identity(facts)})


def facts_identity(facts: ModelFacts) -> dict[str, object]:
    """Return the facts that decide what is built."""
    return {name: value for name, value in asdict(facts).items() if name not in _NOT_BUILT}


# `--model package.module:factory` a second time: its facts from the database, as long as its code is the same.


_DIGITS = 32


def factory_source(spec: str, cache: TraceCache) -> ModelSource:
    """Return the source of a factory's module, whose code runs only where it is new or one of its files changed.

    Raises:
        DsplanError: as `call_factory` and `facts_of_product`.
    """
    series = trace_key({"factory": spec, "directory": os.getcwd(), "versions": trace_versions()})
    for record in cache.series(series):
        files: Any = record.document["files"]
        if unchanged(files):
            return _source(spec, record.document)
    model = call_factory(spec)
    facts = facts_of_product(spec, model)
    document: dict[str, object] = {
        "facts": asdict(facts),
        "files": source_files(_modules(spec, model.model)),
        "structure": _structure(model),
        "work": list(_work_of(facts, model)),
    }
    cache.keep(trace_record(trace_key({"series": series, **document}), series, document))
    return _source(spec, document)


def _source(spec: str, document: Mapping[str, Any]) -> ModelSource:
    facts = from_json(ModelFacts, document["facts"])
    code = digest(document["files"], _DIGITS)
    identity = {"factory": spec, "code": code, "structure": document["structure"]}
    task, length = document["work"]
    return ModelSource(facts=facts, factory=spec, identity=identity, work=(task, length))


def _work_of(facts: ModelFacts, model: Product) -> tuple[Task | None, int | None]:
    if model.batch is None:
        return None, None
    from strategies.tracing.module_trace import work_of

    return work_of(facts, model.model, model.batch)


def _modules(spec: str, product: Any) -> set[str]:
    """Return the Python modules that define the factory and every class of what it made."""
    parts = product.modules() if hasattr(product, "modules") else (product,)
    return {spec.partition(":")[0], *(type(part).__module__ for part in parts)}


def _structure(product: Product) -> str:
    """Hash a module's parts, weights, buffers and inputs, or a config."""
    model = product.model
    if hasattr(model, "named_parameters"):
        parts = [[name, type(part).__name__] for name, part in model.named_modules()]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]
        return digest([parts, shapes, _inputs(product.batch)], _DIGITS)
    return digest(model.to_dict() if hasattr(model, "to_dict") else dict(model), _DIGITS)


def _inputs(batch: Any) -> object:
    """Return the structure of a batch in JSON: tensors by shape and dtype, all else as it is printed."""
    if isinstance(batch, Mapping):
        return {str(name): _inputs(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [_inputs(part) for part in batch]
    return [list(batch.shape), str(batch.dtype)] if hasattr(batch, "shape") else repr(batch)
