"""Measurements, plan keys and fingerprints as values."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from dsplan.api import plan as best_plan
from hardware_db.errors import DsplanError
from hardware_db.files import canonical_json
from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions, fingerprint
from hardware_db.measurement import CIRCUMSTANCES, Measured, measure_run, plan_key
from hardware_db.probe.machine import Gpu, Host, Machine, MigDevice, Software
from planner.types.plan_io import plan_to_dict
from tests.hardware_db.store.records import A100, measurement, plan, rate

GIB = 1 << 30


def test_measure_run_takes_the_predictions_from_the_plan() -> None:
    run = measure_run(plan(), A100, outcome="completed", measured=Measured(steps=20, last_loss=3.5))
    assert (run.predicted.peak_allocated_bytes, run.predicted.step_seconds) == (3_000_000_000, 0.25)
    assert (run.model, run.strategy, run.source, run.measured.steps) == ("opt-125m", "ddp", "run", 20)
    assert run.plan == plan()
    assert re.fullmatch(r"[0-9a-f]{32}", run.id)


def test_two_runs_of_one_plan_have_their_own_ids_and_times_in_order() -> None:
    first, second = (measure_run(plan(), A100, outcome="failed", measured=Measured()) for _ in range(2))
    assert first.id != second.id
    assert first.created_at <= second.created_at


def test_measurements_are_frozen_and_equal_by_value() -> None:
    run = measurement(1)
    assert run == measurement(1)
    assert hash(run) == hash(measurement(1))
    with pytest.raises(FrozenInstanceError):
        run.outcome = "failed"  # type: ignore[misc]


def test_a_loss_that_is_not_finite_is_kept_as_none() -> None:
    diverged = Measured(first_loss=10.8, last_loss=math.nan)
    assert (diverged.first_loss, diverged.last_loss) == (10.8, None)
    assert Measured(last_loss=-0.5).last_loss == -0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "7"}, "id '7' is not 32 hexadecimal digits"),
        ({"created_at": "2026-01-31 00:00"}, "created_at '2026-01-31 00:00' is not a UTC time"),
        ({"created_at": "2026-1-31T00:00:00.0Z"}, "is not a UTC time"),
        ({"outcome": "fine"}, "outcome 'fine' is not one of completed, failed, out_of_memory, interrupted"),
        ({"plan_json": '{"plan":{"strategy":"ddp"},"cluster":{}}'}, "plan.model is missing or not an object"),
        ({"plan_json": '{"model":{"name":"x"},"plan":{},"cluster":{}}'}, "plan.plan.strategy is missing"),
        ({"plan_json": '{"model":{"name":"x"},"plan":{"strategy":"ddp"}}'}, "plan.cluster is missing"),
    ],
)
def test_a_malformed_measurement_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DsplanError, match=re.escape(message)):
        measurement(1, **changes)


@pytest.mark.parametrize("figure", [-1, math.inf, math.nan, 2**63, 10**400])
def test_a_figure_out_of_range_names_the_field(figure: float) -> None:
    with pytest.raises(DsplanError, match=r"measured\.host_bytes is .* it must be at least 0 and fit in 64 bits"):
        Measured(host_bytes=figure)  # type: ignore[arg-type]
    with pytest.raises(DsplanError, match=r"rate\.value is "):
        rate(1, value=figure)


def test_the_plan_key_changes_with_every_input_and_only_with_inputs() -> None:
    base = plan()
    for section, left_out in CIRCUMSTANCES.items():
        base[section] = {**base[section], **dict.fromkeys(left_out)}
    key = plan_key(base)
    keys = {key}
    for section, left_out in CIRCUMSTANCES.items():
        assert set(base[section]) > left_out
        for name in base[section]:
            changed = plan_key({**base, section: {**base[section], name: "changed"}})
            if name in left_out:
                assert changed == key, f"{section}.{name}"
            else:
                assert changed not in keys, f"{section}.{name}"
                keys.add(changed)
    assert plan_key({**base, "memory": {}, "time": {}, "schema_version": 2}) == key


def test_a_real_plan_has_its_key_from_every_field_of_its_configuration() -> None:
    real = plan_to_dict(best_plan(model="opt-125m", gpus=2, gpu="a100-80"))
    assert set(CIRCUMSTANCES) <= set(real)
    key = plan_key(real)
    for name in real["plan"]:
        assert plan_key({**real, "plan": {**real["plan"], name: "changed"}}) != key, name


def test_the_plan_key_does_not_depend_on_the_order_of_keys() -> None:
    backwards = {name: dict(reversed(section.items())) for name, section in plan().items() if isinstance(section, dict)}
    assert plan_key(dict(reversed(backwards.items()))) == plan_key(plan())


def test_the_plan_key_is_the_same_in_every_release() -> None:
    assert plan_key(plan()) == "95d6c048703d3b2c23ee7eb9c59fc2d2"


def test_canonical_json_refuses_what_json_cannot_say() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == '{"a":"\\u00e9","b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": math.nan})


@pytest.mark.parametrize("value", [A100.machine, A100.versions], ids=["machine", "versions"])
def test_the_fingerprint_changes_with_every_field(value: MachineIdentity | Versions) -> None:
    keys = {value.key}
    for item in fields(value):
        present = getattr(value, item.name)
        other = replace(value, **{item.name: present + (1 if isinstance(present, int) else "x")})
        assert other.key not in keys, item.name
        keys.add(other.key)
    assert A100.key == f"{A100.machine.key}-{A100.versions.key}"
    assert A100.key == "8bb9b72bc5eb-aab12e1372e5"


def _machine(*gpus: Gpu) -> Machine:
    host = Host(system="Linux", cpu_model="AMD EPYC 7763", physical_cores=64, logical_cores=128, usable_cores=16)
    packages = (("torch", "2.6.0"), ("nccl", "2.21.5"), ("accelerate", "1.12.0"))
    return Machine(
        host=host,
        software=Software(python="3.11.7", driver="550.54.15", torch_cuda="12.4", packages=packages),
        gpus=gpus,
    )


def _gpu(index: int, **changes: Any) -> Gpu:
    values: dict[str, Any] = {"name": "NVIDIA A100-SXM4-80GB", "total_bytes": 80 * GIB, "free_bytes": 79 * GIB}
    return Gpu(index=index, **{**values, "nvlink_links": 12, "nvlink_to_switch": True, **changes})


def test_a_machine_with_gpus() -> None:
    read = fingerprint(_machine(_gpu(0), _gpu(1)))
    assert read == Fingerprint(
        machine=MachineIdentity(
            device="NVIDIA A100-SXM4-80GB",
            device_count=2,
            device_memory_bytes=80 * GIB,
            driver="550.54.15",
            cpu="AMD EPYC 7763",
            cores=64,
            link="nvswitch x12",
        ),
        versions=Versions(python="3.11.7", torch="2.6.0", cuda="12.4", nccl="2.21.5", accelerate="1.12.0"),
    )


def test_what_changes_from_minute_to_minute_does_not_change_the_fingerprint() -> None:
    before = fingerprint(_machine(_gpu(0), _gpu(1, pcie_generation=4)))
    busy = _gpu(0, free_bytes=GIB, sm_clock_mhz=210, temperature_celsius=80, throttle_reasons=("power",))
    assert fingerprint(_machine(busy, _gpu(1, visible=False, pcie_generation=1))) == before


def test_a_machine_without_gpus_is_its_cpu() -> None:
    machine = fingerprint(_machine()).machine
    assert (machine.device, machine.device_count, machine.device_memory_bytes, machine.link) == ("", 0, 0, "")
    assert (machine.cpu, machine.cores) == ("AMD EPYC 7763", 64)


@pytest.mark.parametrize(
    ("changes", "link"),
    [
        ({}, "nvswitch x12"),
        ({"nvlink_to_switch": False, "nvlink_links": 4}, "nvlink x4"),
        ({"nvlink_links": 0, "pcie_generation_max": 4, "pcie_width_max": 16}, "pcie4 x16"),
        ({"nvlink_links": None, "pcie_generation_max": 5}, "pcie5 x?"),
        ({"nvlink_links": None}, ""),
    ],
)
def test_the_link_between_the_gpus(changes: dict[str, Any], link: str) -> None:
    assert fingerprint(_machine(_gpu(0, **changes), _gpu(1, **changes))).machine.link == link
    assert fingerprint(_machine(_gpu(0, **changes))).machine.link == ""


def test_a_gpu_cut_into_slices_counts_as_its_slices() -> None:
    slices = tuple(MigDevice(name="NVIDIA A100 MIG 3g.40gb", total_bytes=40 * GIB) for _ in range(2))
    machine = fingerprint(_machine(_gpu(0, mig_enabled=True, mig_devices=slices), _gpu(1))).machine
    assert machine.device == "NVIDIA A100 MIG 3g.40gb + NVIDIA A100-SXM4-80GB"
    assert (machine.device_count, machine.device_memory_bytes) == (3, 40 * GIB)
