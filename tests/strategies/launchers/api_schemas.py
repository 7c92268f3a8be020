"""The schemas of the Kubernetes API's own OpenAPI document, which `kubernetes-validate` carries, over what is answered.

Its files are the document's definitions, one for each kind, in which fields that it has not are errors ("strict").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

CUSTOM = {"kubeflow.org", "jobset.x-k8s.io", "trainer.kubeflow.org", "kueue.x-k8s.io"}
"""Groups of custom resources: of these the document says what metadata is."""
METADATA, LIST_METADATA = "objectmeta-meta-v1", "listmeta-meta-v1"


def problems_of(document: Mapping[str, Any]) -> list[str]:
    """Return the problems of an answer, which has to say its kind."""
    version, kind = str(document.get("apiVersion", "")), str(document.get("kind", ""))
    if not version or not kind:
        return [f"no apiVersion and kind: {json.dumps(document)[:100]}"]
    group = version.rpartition("/")[0]
    if group in CUSTOM:
        return [*_of_custom(kind, document)]
    name = f"{group.partition('.')[0]}-{version.rpartition('/')[2]}".lstrip("-")
    name = "meta-v1" if kind == "Status" else name
    return [*_errors(f"{kind.lower()}-{name}", document, kind)]


def problems_of_change(change: Mapping[str, Any]) -> list[str]:
    """Return the problems of a line of a watch."""
    return [*_errors("watchevent-meta-v1", change, "WatchEvent"), *problems_of(change["object"])]


def _of_custom(kind: str, document: Mapping[str, Any]) -> Iterator[str]:
    is_list = kind.endswith("List")
    yield from _errors(LIST_METADATA if is_list else METADATA, document["metadata"], f"{kind}.metadata")
    for item in document["items"] if is_list else ():
        yield from problems_of(item)


def _errors(name: str, document: Any, called: str) -> Iterator[str]:
    for error in _validator(name).iter_errors(document):
        yield f"{called}{error.json_path[1:]}: {error.message}"[:400]


@cache
def _validator(name: str) -> Any:
    import jsonschema
    from referencing import Resource

    return jsonschema.Draft202012Validator(_file(name), registry=Resource.from_contents(_file(name)) @ _definitions())


@cache
def _definitions() -> Any:
    from referencing import Registry, Resource

    return Resource.from_contents(_file("_definitions")) @ Registry()


def _file(name: str) -> Any:
    from kubernetes_validate import utils

    return utils.schema_contents(f"kubernetes-json-schema/v{utils.latest_version()}-local-strict/{name}.json", "")
