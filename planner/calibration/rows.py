"""Stored runs as jobs that can be priced again, and so be learnt from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_db.datasheets import find_device, find_link
from hardware_db.errors import DsplanError
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement, RateMeasurement
from hardware_db.probe import Machine
from hardware_db.store.contract import Store
from planner.cluster.probed import probed_cluster
from planner.cluster.rates import rates_from_measurements
from planner.models.counting.count import count_parameters
from planner.models.facts_document import facts_of_plan
from planner.types.cluster import Cluster
from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from planner.types.plan_io import configuration_from_dict
from planner.vocabulary import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A completed run: what ran, and the seconds of its median step. `doubt` is a logarithmic spread to add to what is
    usual for such runs."""

    job: Job
    seconds: float
    doubt: float = 0.0

    @property
    def model(self) -> str:
        return self.job.facts.name


class Rebuilder:
    """Makes rows of measurements. `machine` is the one that is here: only its own clusters are probed anew."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self._store = store
        self._machine = machine
        self._here = fingerprint(machine).machine.key
        self._rates: dict[str, tuple[RateMeasurement, ...]] = {}

    def rows(self, measurements: Iterable[Measurement]) -> tuple[Row, ...]:
        """The rows of those that completed, have a step time, and can be priced again."""
        found = (
            self.row(measurement)
            for measurement in measurements
            if measurement.outcome == "completed" and measurement.measured.step_seconds
        )
        return tuple(row for row in found if row is not None)

    def row(self, measurement: Measurement) -> Row | None:
        """Return the row of a measurement, or None if its model or hardware is not known any more."""
        plan = measurement.plan
        try:
            configuration = configuration_from_dict(plan["plan"])
            workload = _workload(_section(plan, "workload"), configuration)
            facts = facts_of_plan(_section(plan, "model"), workload.task)
            cluster = self._cluster(_section(plan, "cluster"), measurement, configuration.precision)
        except (DsplanError, KeyError, TypeError, ValueError):
            return None
        if facts is None or cluster is None or not measurement.measured.step_seconds:
            return None
        job = Job(
            facts=facts,
            counts=count_parameters(facts),
            workload=workload,
            cluster=cluster,
            configuration=configuration,
        )
        return Row(job=job, seconds=measurement.measured.step_seconds)

    def _cluster(self, section: Mapping[str, Any], measurement: Measurement, precision: Precision) -> Cluster | None:
        key = measurement.fingerprint.machine.key
        cluster = self._probed(section) if key == self._here else _named(section)
        if cluster is None:
            return None
        if key not in self._rates:
            self._rates[key] = self._store.rates(key)
        if not self._rates[key]:
            return cluster
        rates = rates_from_measurements(self._rates[key], ranks=cluster.gpus_per_node, precision=precision)
        return replace(cluster, rates=rates)

    def _probed(self, section: Mapping[str, Any]) -> Cluster | None:
        cluster = probed_cluster(self._machine, ranks=int(section["gpus"]))
        same = (cluster.device.name, cluster.nodes) == (section["device"], section["nodes"])
        return cluster if same else _named(section)


def _named(section: Mapping[str, Any]) -> Cluster | None:
    """A cluster of catalogue devices by what a plan says of it; a processor elsewhere cannot be priced."""
    if section["device"] == "cpu":
        return None
    device = find_device(section["device"])
    return Cluster(
        device=device,
        nodes=int(section["nodes"]),
        gpus_per_node=int(section["gpus_per_node"]),
        capacity_bytes=int(section["capacity_bytes"]),
        intra_link=find_link(section["intra_link"]) if section.get("intra_link") else None,
        inter_link=find_link(section["inter_link"]) if section.get("inter_link") else None,
        nics_per_node=int(section.get("nics_per_node") or 1),
        host_memory_bytes_per_node=int(section.get("host_memory_bytes_per_node") or 0),
        nvme_bytes_per_node=int(section.get("nvme_bytes_per_node") or 0),
        node_type=str(section.get("node_type") or ""),
    )


def _workload(section: Mapping[str, Any], configuration: Configuration) -> Workload:
    return Workload(
        task=section["task"],
        sequence_length=configuration.sequence_length,
        global_batch_size=configuration.global_batch_size,
        precision=configuration.precision,
        optimizer=configuration.optimizer,
        attention=configuration.attention,
        source_length=int(section.get("source_length") or 0),
    )


def _section(plan: Mapping[str, object], name: str) -> Mapping[str, Any]:
    section = plan.get(name)
    if not isinstance(section, Mapping):
        raise KeyError(name)
    return section
