"""Results of a run (Measurement) or of a micro-benchmark (RateMeasurement) on one machine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from datetime import datetime, timezone
from functools import cache
from typing import Any, Literal, TypeAlias, cast, get_args

from hardware_db.errors import DsplanError
from hardware_db.files import canonical_json, digest
from hardware_db.fingerprint import Fingerprint
from hardware_db.records import dataclass

Outcome = Literal["completed", "failed", "out_of_memory", "interrupted"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

PLAN_KEY_VERSION = 1
# What is free now and the limits the planner was given decide which configuration is chosen, not what it then does.
CIRCUMSTANCES: Mapping[str, frozenset[str]] = {
    "model": frozenset(),
    "cluster": frozenset(
        {"assumed", "capacity_bytes", "host_memory_bytes_per_node", "nvme_bytes_per_node", "probed", "rates"}
    ),
    "workload": frozenset({"max_memory_bytes", "host_memory_bytes"}),
    "plan": frozenset(),
}

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_LARGEST_INTEGER = 2**63 - 1


class RecordError(DsplanError):
    """A figure or a word that a measurement cannot hold; `where` names it."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} {problem}")
        self.where = where
        self.problem = problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of a run on its busiest rank; a figure that was not measured is None.

    Memory in bytes, `host_bytes` per node. `step_seconds` is the median optimizer step, between the 5th and the 95th
    percentile of the settled steps (`step_seconds_low`, `step_seconds_high`); `tokens_per_second` counts all ranks,
    `steps` the optimizer steps done. A loss that is not finite is kept as None: JSON and SQL have no NaN.

    Raises:
        RecordError: a figure is negative, not finite, or beyond 64 bits.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    tokens_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        for name in ("first_loss", "last_loss"):
            loss = getattr(self, name)
            if loss is not None and not math.isfinite(loss):
                object.__setattr__(self, name, None)
        _check_figures(self, "measured", signed=("first_loss", "last_loss"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Predictions of a plan: bytes on the busiest rank and seconds per optimizer step, None where it has none.

    The interval should hold nine runs of ten.

    Raises:
        RecordError: a figure is negative, not finite, or beyond 64 bits.
    """

    peak_allocated_bytes: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None

    def __post_init__(self) -> None:
        _check_figures(self, "predicted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One real run.

    `plan_json` is the object of `estimate --json` as canonical JSON, `created_at` UTC with microseconds and a final Z,
    `source` is `run`, `bench`, `import`, or `shipped:` and where the row was published.

    Raises:
        RecordError: a field is malformed, or the plan lacks model.name, plan.strategy or cluster.
    """

    id: str
    created_at: str
    plan_json: str
    fingerprint: Fingerprint
    outcome: Outcome
    source: str
    measured: Measured = field(default_factory=Measured)
    predicted: Predicted = field(default_factory=Predicted)

    def __post_init__(self) -> None:
        _check_identity(self.id, self.created_at)
        _check_figures(self.fingerprint.machine, "fingerprint.machine")
        if self.outcome not in OUTCOMES:
            raise RecordError("outcome", f"{self.outcome!r} is not one of {', '.join(OUTCOMES)}")
        if _has_sections(self.plan_json):
            return
        plan = self.plan
        for section, name in (("model", "name"), ("plan", "strategy")):
            if not isinstance(_section(plan, section).get(name), str):
                raise RecordError(f"plan.{section}.{name}", "is missing or not a string")
        _section(plan, "cluster")

    @property
    def plan_sections(self) -> Mapping[str, bytes]:
        """Return the plan's sections as JSON, each still to be decoded: equal sections are equal bytes."""
        sections = _decoders()[0].decode(self.plan_json)
        return {name: bytes(raw) for name, raw in sections.items()}

    @property
    def plan(self) -> dict[str, object]:
        """The plan as a fresh dictionary, every time it is asked for."""
        return cast("dict[str, object]", json.loads(self.plan_json))

    @property
    def plan_key(self) -> str:
        """The key of the plan's inputs; see `plan_key`."""
        return plan_key(self.plan)

    @property
    def model(self) -> str:
        """The name of the model that was trained."""
        return str(_section(self.plan, "model")["name"])

    @property
    def parameters(self) -> int | None:
        """Number of the model's parameters, or None if the plan does not say."""
        count = _section(self.plan, "model").get("parameters")
        return count if isinstance(count, int) else None

    @property
    def strategy(self) -> str:
        """The strategy of the plan that ran."""
        return str(_section(self.plan, "plan")["strategy"])


@dataclass(frozen=True, kw_only=True, slots=True)
class RateMeasurement:
    """One point of a micro-benchmark: `operation` (matmul, memory, all_reduce …) ran at `value` `unit`.

    `size` is the bytes moved per rank, for matmul the edge of the square matrices, or None if the rate has no size.
    `shape` is what `size` cannot say: m, k, n of a matrix product, batch, heads, length, head width of attention.
    `dtype` is empty where it does not matter; `ranks` is how many processes took part. `value` is the median of
    `repeats` rounds, whose largest was `1 + spread` times the smallest; `spread` is None if not kept.

    Raises:
        RecordError: a field is malformed or a figure negative, not finite, or beyond 64 bits.
    """

    id: str
    created_at: str
    operation: str
    value: float
    unit: str
    fingerprint: Fingerprint
    source: str
    dtype: str = ""
    size: int | None = None
    ranks: int = 1
    shape: tuple[int, ...] = ()
    spread: float | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        _check_identity(self.id, self.created_at)
        _check_figures(self.fingerprint.machine, "fingerprint.machine")
        _check_figures(self, "rate")
        if not all(type(extent) is int and 0 < extent <= _LARGEST_INTEGER for extent in self.shape):
            raise RecordError("rate.shape", f"is {self.shape}; every extent must be a whole number above 0")
        for name in ("operation", "unit"):
            if not getattr(self, name):
                raise RecordError(name, "is empty")


Record: TypeAlias = Measurement | RateMeasurement


def new_id() -> str:
    """Return an id no other record has: 32 hexadecimal digits."""
    import uuid

    return uuid.uuid4().hex


def utc_now() -> str:
    """Now, in the one form `created_at` takes, so that text order is time order."""
    return datetime.now(timezone.utc).strftime(_TIME_FORMAT)


def measure_run(
    plan: Mapping[str, object], fingerprint: Fingerprint, *, outcome: Outcome, measured: Measured, source: str = "run"
) -> Measurement:
    """Return the measurement of a run that just ended.

    `plan` is the object of `estimate --json` and holds the predictions.

    Raises:
        RecordError: a figure is malformed or the plan lacks a section.
    """
    return Measurement(
        id=new_id(),
        created_at=utc_now(),
        plan_json=canonical_json(plan),
        fingerprint=fingerprint,
        outcome=outcome,
        source=source,
        measured=measured,
        predicted=_predictions_of(_section(plan, "memory"), _section(plan, "time")),
    )


def plan_key(plan: Mapping[str, object]) -> str:
    """Return the hash of a plan's inputs: model, cluster, workload and configuration, 32 hexadecimal digits.

    Two plans with one key are the same job on the same kind of hardware. Estimates do not enter, nor do CIRCUMSTANCES.
    """
    sections = {"workload": {}, **plan}
    inputs = {
        name: {key: value for key, value in _section(sections, name).items() if key not in left_out}
        for name, left_out in CIRCUMSTANCES.items()
    }
    return digest({"plan_key_version": PLAN_KEY_VERSION, **inputs}, 32)


def _predictions_of(memory: Mapping[str, object], time: Mapping[str, object]) -> Predicted:
    """Return what a plan's estimates promise."""
    return Predicted(
        peak_allocated_bytes=cast("int | None", memory.get("peak_allocated_bytes")),
        step_seconds=cast("float | None", time.get("step_seconds")),
        step_seconds_low=cast("float | None", time.get("step_seconds_low")),
        step_seconds_high=cast("float | None", time.get("step_seconds_high")),
    )


@cache
def _decoders() -> tuple[Any, Any]:
    """Return what decodes a plan to its sections, and what does so only if it has those that it must have."""
    import msgspec

    model, configuration = msgspec.defstruct("model", [("name", str)]), msgspec.defstruct("plan", [("strategy", str)])
    needed = [("model", model), ("plan", configuration), ("cluster", dict[str, msgspec.Raw])]
    return msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(msgspec.defstruct("needed", needed))


def _has_sections(plan_json: str) -> bool:
    """Return whether a plan has what every plan has, at a tenth of what decoding all of it takes."""
    import msgspec

    try:
        _decoders()[1].decode(plan_json)
    except (msgspec.MsgspecError, UnicodeError):
        return False  # what is wrong with it is said elsewhere
    return True


def _section(plan: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = plan.get(name)
    if not isinstance(section, Mapping):
        raise RecordError(f"plan.{name}", "is missing or not an object")
    return section


def _check_identity(id: str, created_at: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{32}", id):
        raise RecordError("id", f"{id!r} is not 32 hexadecimal digits")
    try:  # a fifth of the time of strptime, which every row of a database would take
        in_form = _TIME.fullmatch(created_at) is not None and bool(datetime.fromisoformat(created_at[:-1]))
    except ValueError:
        in_form = False
    if not in_form:
        raise RecordError("created_at", f"{created_at!r} is not a UTC time such as 2026-01-31T12:00:00.000000Z")


def _check_figures(record: object, where: str, *, signed: tuple[str, ...] = ()) -> None:
    kind: Any = type(record)
    for name in _names(kind):
        figure = getattr(record, name)
        if not isinstance(figure, (int, float)):
            continue
        # The bound comes first: `isfinite` overflows on an integer no float can hold.
        too_large = abs(figure) > _LARGEST_INTEGER or not math.isfinite(figure)
        if too_large or (figure < 0 and name not in signed):
            raise RecordError(f"{where}.{name}", f"is {figure}; it must be at least 0 and fit in 64 bits")


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


_KEY_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareKind:
    """The hardware that one calibration holds for.

    A device and the links between devices and nodes, by their names in the catalogue; empty where there is none.
    """

    device: str
    intra_link: str = ""
    inter_link: str = ""

    @property
    def key(self) -> str:
        """32 hexadecimal digits that change with any field."""
        return digest(asdict(self), _KEY_DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """One calibration. `document_json` is canonical JSON, whose meaning is the planner's."""

    id: str
    created_at: str
    hardware: HardwareKind
    document_json: str

    @property
    def document(self) -> dict[str, object]:
        """Factors and errors, as a fresh dictionary every time it is asked for."""
        return cast("dict[str, object]", json.loads(self.document_json))


def calibration_record(hardware: HardwareKind, document: Mapping[str, object]) -> CalibrationRecord:
    """Return the record of a calibration that was just made."""
    return CalibrationRecord(
        id=new_id(), created_at=utc_now(), hardware=hardware, document_json=canonical_json(document)
    )


KEY_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    """One answer of the tracer.

    `key` is the hash of everything the answer depends on, `series` the hash of what several answers share that differ
    in sizes only, `document_json` the answer as canonical JSON, whose meaning is the planner's.
    """

    key: str
    series: str
    created_at: str
    document_json: str

    @property
    def document(self) -> dict[str, object]:
        """The answer as a fresh dictionary, every time it is asked for."""
        return cast("dict[str, object]", json.loads(self.document_json))


def trace_key(question: Mapping[str, object]) -> str:
    """Return the key of a question to the tracer: 32 hexadecimal digits of the hash of its canonical JSON."""
    return digest(question, KEY_DIGITS)


def trace_record(key: str, series: str, document: Mapping[str, object]) -> TraceRecord:
    """Return the record of an answer that was just found."""
    return TraceRecord(key=key, series=series, created_at=utc_now(), document_json=canonical_json(document))
