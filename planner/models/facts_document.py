"""ModelFacts as a JSON object and back, for models that no catalogue can give again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from planner.errors import DsplanError
from planner.models.catalogue import counts_from_document, find_model, knows_model
from planner.models.facts import MlaFacts, ModelFacts, TowerFacts
from planner.models.tasks import facts_for_task
from planner.vocabulary import Task

_NOT_KEPT = frozenset({"traced", "note", "aliases"})
"""What a trace found is memory's business, and large."""


def facts_document(facts: ModelFacts, task: Task) -> dict[str, object] | None:
    """Return the fields of a model that are not at their defaults; None for one that the catalogue has as it is."""
    if knows_model(facts.name) and facts_for_task(find_model(facts.name), task) == facts:
        return None
    document = asdict(facts)
    return {
        item.name: document[item.name]
        for item in fields(ModelFacts)
        if item.name not in _NOT_KEPT and (item.default is MISSING or document[item.name] != item.default)
    }


def facts_of_plan(model: Mapping[str, Any], task: Task) -> ModelFacts | None:
    """Return the facts of a plan's `model` section, or None if neither it nor the catalogue has them."""
    document = model.get("facts")
    if document is not None:
        return _facts(document)
    name = str(model.get("name"))
    if not knows_model(name):
        return None
    facts = facts_for_task(find_model(name), task)
    # A plan's parameters count adapters too, which are none of the model's.
    active = model.get("active_parameters")
    same = facts.parameters == model.get("parameters") if active is None else facts.active_parameters == active
    return facts if same else None


def _facts(document: Mapping[str, Any]) -> ModelFacts | None:
    values = dict(document)
    try:
        for name, part in (("mla", MlaFacts), ("text", TowerFacts), ("vision", TowerFacts)):
            if values.get(name) is not None:
                values[name] = part(**values[name])
        if values.get("measured_counts") is not None:
            values["measured_counts"] = counts_from_document(values["measured_counts"])
        return ModelFacts(**values)
    except (TypeError, KeyError, DsplanError):
        return None  # of a release that knew other fields
