"""What the database knows, brought to a request: measured rates, the calibration of such hardware, earlier runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hardware_db.paths import database_is_there
from planner.calibration.calibration import calibration_of
from planner.calibration.experience import Experience
from planner.cluster import NOTHING_MEASURED, Cluster
from planner.described import described
from planner.plan import Configuration
from planner.request import Request

if TYPE_CHECKING:
    # Imported where they are used: most questions are asked where there is no database, and start faster without.
    from hardware_db.measurement import Measurement, Outcome
    from hardware_db.store.contract import Store
    from planner.calibration.known import KnownRun
    from planner.shortage import Shortage

_NEWEST = 200
"""Runs of one size of model that are looked through: reading them takes 20 ms."""


def recalled(request: Request) -> Request:
    """The request with everything that the user's database has for its hardware and its work.

    Where there is no database this costs one look at the disk; where it cannot be used, one line says so and the
    request stays as it is. Rates and earlier runs are those of the probed machine; a calibration holds for every
    cluster of the same devices and links.
    """
    if not database_is_there():
        return request
    from hardware_db.store import ask_store

    return ask_store(lambda store: recalled_from(store, request), request)


def recalled_from(store: Store, request: Request) -> Request:
    """The same out of an open store."""
    request = replace(request, cluster=with_rates(store, request))
    calibration = calibration_of(store, request.cluster)
    if calibration is not None:
        request = replace(request, cluster=replace(request.cluster, factors=calibration.factors))
    made = _made(store, request, "completed")
    experience = Experience(
        calibration=calibration, known=_known(made, request), shortages=_shortages(store, request, made)
    )
    return replace(request, experience=experience)


def with_rates(store: Store, request: Request) -> Cluster:
    """The cluster with the rates that were measured on this machine with as many ranks, for the request's precision,
    unless it has such rates already."""
    cluster = request.cluster
    is_open = cluster.machine is not None and cluster.rates == NOTHING_MEASURED
    measured = store.rates(_machine_key(cluster)) if is_open else ()
    if not measured:
        return cluster
    from planner.machine_rates import rates_from_measurements

    ranks = cluster.gpus_per_node
    rates = rates_from_measurements(measured, ranks=ranks, precision=request.workload.precision)
    return replace(cluster, rates=rates)


def _made(store: Store, request: Request, outcome: Outcome) -> tuple[Measurement, ...]:
    """The newest runs of a model of this size on this machine."""
    cluster = request.cluster
    if cluster.machine is None:
        return ()
    return store.list(
        fingerprint=_machine_key(cluster), outcome=outcome, parameters=request.counts.total, limit=_NEWEST
    )


def _known(made: tuple[Measurement, ...], request: Request) -> dict[Configuration, KnownRun]:
    if not made:
        return {}
    from planner.calibration.known import known_runs

    return known_runs(made, described(request))


def _shortages(store: Store, request: Request, completed: tuple[Measurement, ...]) -> tuple[Shortage, ...]:
    failed = _made(store, request, "out_of_memory")
    if not failed:
        return ()
    from planner.calibration.failures import shortages

    return shortages(failed, completed, request)


def _machine_key(cluster: Cluster) -> str:
    from hardware_db.fingerprint import fingerprint

    return "" if cluster.machine is None else fingerprint(cluster.machine).machine.key
