"""Requests for tests: a catalogue model on catalogue devices, in one line."""

from __future__ import annotations

from dataclasses import replace

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.search.request import Request, WorkOptions, make_request


def question(model: str, gpu: str, gpus: int, **options: object) -> Request:
    """A request; options of WorkOptions and Request may be mixed."""
    work = {name: options.pop(name) for name in tuple(options) if name in WorkOptions.__dataclass_fields__}
    cluster = resolve_cluster(HardwareRequest(gpu=gpu, gpus=gpus))
    request = make_request(find_model(model), cluster, WorkOptions(**work))  # type: ignore[arg-type]
    return replace(request, **options)  # type: ignore[arg-type]
