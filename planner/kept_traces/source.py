"""ModelSource: where the module to trace comes from, known well enough to find its earlier traces without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hardware_db.handed_in import read_json
from planner.kept_traces.cache import TraceCache
from planner.models.facts import ModelFacts
from planner.models.resolve import config_file, is_factory, resolve_model

# Names and remarks do not change what is built.
_NOT_BUILT = ("name", "aliases", "note", "traced")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model as facts, and where it is built from: the facts alone, a `config` (parsed JSON), or a `factory`
    (`package.module:function`). `identity` is what the module depends on, as JSON.
    """

    facts: ModelFacts
    config: Mapping[str, Any] = field(default_factory=dict)
    factory: str = ""
    identity: Mapping[str, object]


def model_source(name: str | None, model_size: str | None, cache: TraceCache) -> ModelSource:
    """The source of what `--model` or `--model-size` names.

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
            from planner.kept_traces.factory_source import factory_source

            return factory_source(name.strip(), cache)
    facts = resolve_model(name, model_size=model_size)
    return ModelSource(facts=facts, identity={"facts": facts_identity(facts)})


def facts_identity(facts: ModelFacts) -> dict[str, object]:
    """The facts that decide what is built."""
    return {name: value for name, value in asdict(facts).items() if name not in _NOT_BUILT}
