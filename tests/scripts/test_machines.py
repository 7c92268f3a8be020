"""Predictions beside rows are made for the machine of the rows."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.measured_rows import SHIPPED
from hardware_db.probe import Host, Machine, Software
from scripts.measure import machines
from scripts.measure.compositions import predicted_seconds, question, read_compositions
from scripts.measure.machines import columns_of, host_of, measured_cluster, record


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*_cpu.csv")), ids=lambda file: file.name)
def test_rows_of_processors_name_machines_that_are_known(file: Path) -> None:
    with file.open(newline="", encoding="utf-8") as rows:
        named = {(row["cpu"], int(row["cores"])) for row in csv.DictReader(rows)}
    for cpu, cores in named:
        assert host_of(cpu, cores).physical_cores == max(1, cores)
    has_seconds = any(word in file.name for word in ("times", "rates", "zero", "compositions"))
    if has_seconds:  # bytes need no machine
        assert ("", 0) not in named


def test_a_machine_that_nobody_recorded_is_refused() -> None:
    with pytest.raises(BrokenFile, match="has no 'no such processor' with 3 cores"):
        measured_cluster("cpu", 2, cpu="no such processor", cores=3)


def test_a_gpu_is_that_of_the_datasheet_with_the_cores_of_its_host() -> None:
    cluster = measured_cluster("H100-SXM5-80GB", 8, cores=24)
    assert (cluster.device.name, cluster.gpus, cluster.host_cores_per_node) == ("H100-SXM5-80GB", 8, 24)


def test_a_machine_that_measures_is_recorded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "machines.csv"
    file.write_text(machines.FILE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(machines, "FILE", file)
    machines._hosts.cache_clear()
    flags = frozenset({"avx2", "fma", "no_rate_of_its_own"})
    host = Host(system="Linux", cpu_model="new", physical_cores=3, cpu_flags=flags, cpu_max_mhz=2000.0)
    here = Machine(host=host, software=Software(python=""))
    try:
        assert record(here) == record(here) == columns_of(here) == {"cpu": "new", "cores": 3}
        assert [line for line in file.read_text().splitlines() if line.startswith("new")] == ["new,3,avx2 fma,2000.0"]
        assert len(file.read_text().splitlines()) == len(machines._hosts()) + 1
    finally:
        machines._hosts.cache_clear()


def test_seconds_are_those_of_the_rows_machine() -> None:
    run = next(run for run in read_compositions() if not run.is_own)
    assert question(run)[0].cluster.host_cores_per_node == run.cores
    fewer = replace(run, cpu="Intel(R) Xeon(R) Processor", cores=2)
    assert predicted_seconds(fewer) > 1.5 * predicted_seconds(run)
