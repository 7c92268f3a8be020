"""Knowledge of the database, brought to a request: measured rates, calibrations of such hardware, earlier runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardware_db.files import database_is_there
from hardware_db.measurement import Measurement
from planner.calibration.calibration import calibration_of
from planner.calibration.experience import Experience, SameWork
from planner.calibration.oom_history import OomRecord
from planner.cost.memory import memory_estimate
from planner.search.estimate import job_of
from planner.search.request import Request
from planner.types.cluster import NOTHING_MEASURED, Cluster
from planner.types.job import sections_of
from planner.types.plan import Configuration

if TYPE_CHECKING:
    # Imported where they are used: most questions are asked where there is no database, and start faster without.
    from hardware_db.measurement import Measurement, Outcome
    from hardware_db.store.contract import Store
    from planner.calibration.experience import KnownRun
    from planner.calibration.oom_history import OomRecord

# Plans of the same model and work that ran out of memory on this machine, from the database.


_WORK = ("sequence_length", "precision", "optimizer", "attention")
"""What of a configuration is the work and not the way it is done. The global batch is not among them: memory follows
the micro-batch."""


def oom_records(
    failed: Iterable[Measurement], completed: Iterable[Measurement], request: Request
) -> tuple[OomRecord, ...]:
    """Return what ran out of memory of this request's model and work, newest first; both lists are of one machine.

    A newer run that completed takes a failure back: one of the same configuration, or one that was predicted to take at
    least as much. Of a plan that offloads it is not known which memory was short, so only one of the same configuration
    does.
    """
    same_work = SameWork(sections_of(request))
    completed_runs = [
        (measurement, ran)
        for measurement in completed
        if (ran := _configuration(measurement, same_work, request)) is not None
    ]
    records: dict[Configuration, OomRecord] = {}
    for measurement in failed:
        configuration = _configuration(measurement, same_work, request)
        if configuration is None or configuration in records or _taken_back(measurement, configuration, completed_runs):
            continue
        records[configuration] = _oom_record(measurement, configuration, request)
    return tuple(records.values())


def oom_record_of(
    configuration: Configuration, predicted_bytes: int, request: Request, **circumstances: Any
) -> OomRecord:
    """Return a failure in today's prediction, so that it can be compared with that of other plans.

    It is in the prediction it was made with where it ran on another number of devices.
    """
    if configuration.world_size != request.cluster.gpus:
        return OomRecord(configuration=configuration, peak_allocated_bytes=predicted_bytes, **circumstances)
    memory = memory_estimate(job_of(request, configuration))
    return OomRecord(
        configuration=configuration,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        host_bytes_per_node=memory.host_bytes_per_node,
        **circumstances,
    )


def _configuration(measurement: Measurement, same_work: SameWork, request: Request) -> Configuration | None:
    configuration, workload = same_work.configuration(measurement), request.workload
    if configuration is None:
        return None
    return configuration if all(getattr(configuration, name) == getattr(workload, name) for name in _WORK) else None


def _taken_back(
    measurement: Measurement, configuration: Configuration, completed: Iterable[tuple[Measurement, Configuration]]
) -> bool:
    need = measurement.predicted.peak_allocated_bytes or 0
    return any(
        later.created_at > measurement.created_at
        and (
            other == configuration
            or (not configuration.uses_host and need <= (later.predicted.peak_allocated_bytes or -1))
        )
        for later, other in completed
    )


def _oom_record(measurement: Measurement, configuration: Configuration, request: Request) -> OomRecord:
    cluster = measurement.plan["cluster"]
    capacity = cluster.get("capacity_bytes") if isinstance(cluster, Mapping) else None
    return oom_record_of(
        configuration,
        measurement.predicted.peak_allocated_bytes or 0,
        request,
        capacity_bytes=capacity if isinstance(capacity, int) else None,
        created_at=measurement.created_at,
        id=measurement.id,
    )


_NEWEST = 200
"""Runs of one size of model that are looked through: reading them takes 15 ms (`scripts/bench/database.py`)."""


def recall(request: Request) -> Request:
    """Return the request with everything that the user's database has for its hardware and its work.

    Where there is no database this costs one look at the disk; where it cannot be used, one line says so and the
    request stays as it is. Rates and earlier runs are those of the probed machine; a calibration holds for every
    cluster of the same devices and links.
    """
    if not database_is_there():
        return request
    from hardware_db.store import ask_store

    return ask_store(lambda store: recall_from(store, request), request)


def recall_from(store: Store, request: Request) -> Request:
    """Return the request with everything that an open store has for its hardware and its work."""
    request = replace(request, cluster=with_rates(store, request))
    calibration = calibration_of(store, request.cluster)
    if calibration is not None:
        request = replace(request, cluster=replace(request.cluster, factors=calibration.factors))
    completed = _newest_runs(store, request, "completed")
    experience = Experience(
        calibration=calibration,
        known_runs=_known_runs(completed, request),
        oom_records=_oom_records(store, request, completed),
    )
    return replace(request, experience=experience)


def with_rates(store: Store, request: Request) -> Cluster:
    """Return the cluster with the rates measured on this machine with as many ranks, for the request's precision.

    A cluster that has such rates already stays as it is.
    """
    cluster = request.cluster
    is_open = cluster.machine is not None and cluster.rates == NOTHING_MEASURED
    measured = store.rates(_machine_key(cluster)) if is_open else ()
    if not measured:
        return cluster
    from planner.cluster.rates import rates_from_measurements

    ranks = cluster.gpus_per_node
    rates = rates_from_measurements(measured, ranks=ranks, precision=request.workload.precision)
    return replace(cluster, rates=rates)


def _newest_runs(store: Store, request: Request, outcome: Outcome) -> tuple[Measurement, ...]:
    """Return the newest runs of a model of this size on this machine; a stranger's machine is never this one."""
    cluster = request.cluster
    if cluster.machine is None:
        return ()
    from hardware_db.store.transfer import is_shared

    runs = store.list(
        fingerprint=_machine_key(cluster), outcome=outcome, parameters=request.counts.total, limit=_NEWEST
    )
    return tuple(run for run in runs if not is_shared(run.source))


def _known_runs(completed: tuple[Measurement, ...], request: Request) -> dict[Configuration, KnownRun]:
    if not completed:
        return {}
    from planner.calibration.experience import known_runs

    return known_runs(completed, sections_of(request))


def _oom_records(store: Store, request: Request, completed: tuple[Measurement, ...]) -> tuple[OomRecord, ...]:
    failed = _newest_runs(store, request, "out_of_memory")
    if not failed:
        return ()

    return oom_records(failed, completed, request)


def _machine_key(cluster: Cluster) -> str:
    from hardware_db.fingerprint import fingerprint

    return "" if cluster.machine is None else fingerprint(cluster.machine).machine.key
