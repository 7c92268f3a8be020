"""TraceRecord: what tracing a model found, kept so that the same question need not be traced twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from hardware_db.canonical import canonical_json, digest
from hardware_db.measurement import utc_now

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
    """The key of a question to the tracer: 32 hexadecimal digits of the hash of its canonical JSON."""
    return digest(question, KEY_DIGITS)


def trace_record(key: str, series: str, document: Mapping[str, object]) -> TraceRecord:
    """The record of an answer that was just found."""
    return TraceRecord(key=key, series=series, created_at=utc_now(), document_json=canonical_json(document))
