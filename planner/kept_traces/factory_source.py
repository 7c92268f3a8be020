"""`--model package.module:factory` a second time: its facts from the database, as long as its code is the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hardware_db.canonical import digest
from hardware_db.trace_record import trace_key, trace_record
from planner.kept_traces.cache import TraceCache
from planner.kept_traces.rebuild import rebuild
from planner.kept_traces.source import ModelSource
from planner.kept_traces.source_files import source_files, unchanged
from planner.kept_traces.versions import trace_versions
from planner.models.factory import facts_of_made, made_by
from planner.models.facts import ModelFacts

_DIGITS = 32


def factory_source(spec: str, cache: TraceCache) -> ModelSource:
    """The source of a factory's module. Its code runs only where it was never asked for or one of its files changed.

    Raises:
        DsplanError: as `made_by` and `facts_of_made`.
    """
    series = trace_key({"factory": spec, "directory": os.getcwd(), "versions": trace_versions()})
    for record in cache.series(series):
        files: Any = record.document["files"]
        if unchanged(files):
            return _source(spec, record.document)
    made = made_by(spec)
    document: dict[str, object] = {
        "facts": asdict(facts_of_made(spec, made)),
        "files": source_files(_modules(spec, made)),
        "structure": _structure(made),
    }
    cache.keep(trace_record(trace_key({"series": series, **document}), series, document))
    return _source(spec, document)


def _source(spec: str, document: Mapping[str, Any]) -> ModelSource:
    facts = rebuild(ModelFacts, document["facts"])
    code = digest(document["files"], _DIGITS)
    identity = {"factory": spec, "code": code, "structure": document["structure"]}
    return ModelSource(facts=facts, factory=spec, identity=identity)


def _modules(spec: str, made: Any) -> set[str]:
    """The Python modules that define the factory and every class of what it made."""
    parts = made.modules() if hasattr(made, "modules") else (made,)
    return {spec.partition(":")[0], *(type(part).__module__ for part in parts)}


def _structure(made: Any) -> str:
    """The hash of a module's parts, weights and buffers, or of a config."""
    if hasattr(made, "named_parameters"):
        parts = [[name, type(part).__name__] for name, part in made.named_modules()]
        tensors = [*made.named_parameters(), *made.named_buffers()]
        shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]
        return digest([parts, shapes], _DIGITS)
    return digest(made.to_dict() if hasattr(made, "to_dict") else dict(made), _DIGITS)
