"""Failures: the plans of a model and work that ran out of memory on this machine, as the database has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hardware_db.measurement import Measurement
from planner.calibration.known import is_same_work
from planner.described import described
from planner.errors import DsplanError
from planner.estimate import job_of
from planner.memory import memory_estimate
from planner.plan import Configuration
from planner.plan_io import configuration_from_dict
from planner.request import Request
from planner.shortage import Shortage

_WORK = ("sequence_length", "precision", "optimizer", "attention")
"""What of a configuration is the work and not the way it is done. The global batch is not among them: memory follows
the micro-batch."""


def shortages(
    failed: Iterable[Measurement], completed: Iterable[Measurement], request: Request
) -> tuple[Shortage, ...]:
    """What ran out of memory of this request's model and work, newest first; both lists are those of one machine.

    A newer run that completed takes a failure back: one of the same configuration, or one that was predicted to take at
    least as much. Of a plan that offloads it is not known which memory was short, so only one of the same configuration
    does.
    """
    inputs = described(request)
    done = [(one, found) for one in completed if (found := _configuration(one, inputs, request)) is not None]
    kept: dict[Configuration, Shortage] = {}
    for one in failed:
        configuration = _configuration(one, inputs, request)
        if configuration is None or configuration in kept or _taken_back(one, configuration, done):
            continue
        kept[configuration] = _shortage(one, configuration, request)
    return tuple(kept.values())


def shortage_of(configuration: Configuration, predicted_bytes: int, request: Request, **known: Any) -> Shortage:
    """A failure in today's prediction, so that it can be compared with that of other plans; in the one it was made
    with where it ran on another number of devices."""
    if configuration.world_size != request.cluster.gpus:
        return Shortage(configuration=configuration, peak_allocated_bytes=predicted_bytes, **known)
    memory = memory_estimate(job_of(request, configuration))
    return Shortage(
        configuration=configuration,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        host_bytes_per_node=memory.host_bytes_per_node,
        **known,
    )


def _configuration(
    one: Measurement, inputs: Mapping[str, Mapping[str, object]], request: Request
) -> Configuration | None:
    if not is_same_work(one.plan, inputs):
        return None
    try:
        configuration = configuration_from_dict(one.plan["plan"])
    except DsplanError:
        return None  # of a release that knew other words
    workload = request.workload
    return configuration if all(getattr(configuration, name) == getattr(workload, name) for name in _WORK) else None


def _taken_back(
    one: Measurement, configuration: Configuration, done: Iterable[tuple[Measurement, Configuration]]
) -> bool:
    need = one.predicted.peak_allocated_bytes or 0
    return any(
        later.created_at > one.created_at
        and (
            other == configuration
            or (not configuration.uses_host and need <= (later.predicted.peak_allocated_bytes or -1))
        )
        for later, other in done
    )


def _shortage(one: Measurement, configuration: Configuration, request: Request) -> Shortage:
    cluster = one.plan["cluster"]
    capacity = cluster.get("capacity_bytes") if isinstance(cluster, Mapping) else None
    return shortage_of(
        configuration,
        one.predicted.peak_allocated_bytes or 0,
        request,
        capacity_bytes=capacity if isinstance(capacity, int) else None,
        created_at=one.created_at,
        id=one.id,
    )
