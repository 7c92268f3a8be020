"""Records that the tests of the database share."""

from __future__ import annotations

from typing import Any

from hardware_db.files import canonical_json
from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions
from hardware_db.measurement import (
    CalibrationRecord,
    HardwareKind,
    Measured,
    Measurement,
    Predicted,
    RateMeasurement,
    TraceRecord,
)
from hardware_db.store.reports import StatusReport

A100 = Fingerprint(
    machine=MachineIdentity(
        device="NVIDIA A100-SXM4-80GB",
        device_count=8,
        device_memory_bytes=85_899_345_920,
        driver="550.54.15",
        cpu="AMD EPYC 7763",
        cores=64,
        link="nvswitch x12",
    ),
    versions=Versions(python="3.11.7", torch="2.6.0", cuda="12.4", nccl="2.21.5", dsplan="0.1.0"),
)
LAPTOP = Fingerprint(machine=MachineIdentity(cpu="laptop", cores=4), versions=Versions(python="3.10.12"))


def plan(**changes: Any) -> dict[str, Any]:
    """A plan in the JSON contract's form; `changes` replace fields of its configuration, or `model` its name."""
    model = changes.pop("model", "opt-125m")
    return {
        "schema_version": 1,
        "model": {"name": model, "parameters": 125_239_296},
        "cluster": {"device": "A100", "gpus": 8, "nodes": 1, "capacity_bytes": 80 << 30},
        "workload": {"task": "causal-lm", "source_length": 0},
        "plan": {"strategy": "ddp", "backend": "torch", "dp_replicate": 8, "micro_batch_size": 4, **changes},
        "memory": {"peak_allocated_bytes": 3_000_000_000},
        "time": {"step_seconds": 0.25},
    }


def measurement(number: int, **changes: Any) -> Measurement:
    """The measurement with id `number`, made `number` seconds after midnight; `changes` replace fields."""
    values: dict[str, Any] = {
        "id": f"{number:032x}",
        "created_at": f"2026-01-31T00:00:{number:02d}.000000Z",
        "plan_json": canonical_json(plan()),
        "fingerprint": A100,
        "outcome": "completed",
        "source": "run",
        "measured": Measured(peak_allocated_bytes=3_100_000_000, step_seconds=0.26, first_loss=10.8, steps=20),
        "predicted": Predicted(peak_allocated_bytes=3_000_000_000, step_seconds=0.25),
    }
    return Measurement(**{**values, **changes})


def rate(number: int, **changes: Any) -> RateMeasurement:
    """The rate with id `number`, made `number` seconds after midnight; `changes` replace fields."""
    values: dict[str, Any] = {
        "id": f"{number:032x}",
        "created_at": f"2026-01-31T00:00:{number:02d}.000000Z",
        "operation": "all_reduce",
        "value": 2.3e11,
        "unit": "bytes/s",
        "fingerprint": A100,
        "source": "run",
        "dtype": "bf16",
        "size": 1 << 28,
        "ranks": 8,
    }
    return RateMeasurement(**{**values, **changes})


def trace(number: int, series: str = "a" * 32) -> TraceRecord:
    """The trace with key `number`, made `number` seconds after midnight."""
    created_at = f"2026-01-31T00:00:{number:02d}.000000Z"
    document = canonical_json({"phases": {"loss": number}})
    return TraceRecord(key=f"{number:032x}", series=series, created_at=created_at, document_json=document)


def calibration(number: int, hardware: HardwareKind | None = None) -> CalibrationRecord:
    """The calibration with id `number`, made `number` seconds after midnight."""
    return CalibrationRecord(
        id=f"{number:032x}",
        created_at=f"2026-01-31T00:00:{number:02d}.000000Z",
        hardware=hardware or HardwareKind(device="A100-SXM4-80GB", intra_link="nvswitch-a100"),
        document_json=canonical_json({"factors": {"compute": 1 + number / 100}}),
    )


def report(number: int, **changes: Any) -> StatusReport:
    """Return the report of the run with id `number`; `changes` replace fields."""
    values: dict[str, Any] = {
        "id": f"{number:032x}", "name": f"run-{number}", "user": "ada", "host": "node7", "state": "running",
        "outcome": "", "model": "opt-125m", "strategy": "zero2", "backend": "torch", "precision": "bf16",
        "device": "gpu", "ranks": 8, "began": 1_800_000_000.25, "held_seconds": 3600.5, "productive_seconds": 3000.0,
        "device_seconds": 28804.0, "usd_per_hour": 4.1, "step": 120, "steps": 1000, "loss": 2.5, "step_seconds": 0.25,
        "tokens_per_second": 1e6, "peak_bytes": 3 << 30, "restarts": 1, "checkpoint_step": 100,
        "checkpoint_age_seconds": 5.0, "quiet_seconds": 0.2, "alerts_json": '{"loss_spike":2}',
    }  # fmt: skip
    return StatusReport(**{**values, **changes})


FROZEN = (
    measurement(1),
    measurement(2, outcome="out_of_memory", measured=Measured(), predicted=Predicted(), fingerprint=LAPTOP),
    rate(3),
)
"""What every file in `schemas/` holds."""
FROZEN_TRACE = trace(4)
"""What the files since schema 2 hold as well."""
FROZEN_RATE = rate(5, operation="matmul", size=None, shape=(512, 1024, 2048), spread=0.08, repeats=7)
FROZEN_RUN = measurement(
    6,
    measured=Measured(step_seconds=0.26, step_seconds_low=0.25, step_seconds_high=0.28, steps=20),
    predicted=Predicted(step_seconds=0.25, step_seconds_low=0.2, step_seconds_high=0.31),
)
FROZEN_CALIBRATION = calibration(7)
"""What the files since schema 3 hold as well."""
FROZEN_REPORT = report(8)
"""What the files since schema 4 hold as well."""
