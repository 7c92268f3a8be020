"""The trace event format, as far as dsplan and torch use it: "Trace Event Format", the Chromium project."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=0)]
Micro = Annotated[float, msgspec.Meta(ge=0)]


class Event(msgspec.Struct, tag_field="ph", forbid_unknown_fields=True, kw_only=True):
    name: str
    pid: Whole
    tid: Whole


class Name(Event, tag="M", kw_only=True):
    name: Literal["process_name", "thread_name", "process_labels", "process_sort_index", "thread_sort_index"]
    ts: Micro = 0
    args: dict[Literal["name", "labels", "sort_index"], str | int]


class Complete(Event, tag="X", kw_only=True):
    cat: str
    ts: Micro
    dur: Micro
    args: dict[str, Any] = {}


class Counter(Event, tag="C", kw_only=True):
    ts: Micro
    args: dict[str, float]


class Instant(Event, tag="i", kw_only=True):
    ts: Micro
    s: Literal["g", "p", "t"]


class FlowStart(Event, tag="s", kw_only=True):
    id: int
    cat: str
    ts: Micro


class FlowEnd(Event, tag="f", kw_only=True):
    id: int
    cat: str
    ts: Micro
    bp: Literal["e"]


class Trace(msgspec.Struct):
    traceEvents: list[Name | Complete | Counter | Instant | FlowStart | FlowEnd]  # noqa: N815
    displayTimeUnit: Literal["ms", "ns"]  # noqa: N815
    otherData: dict[str, str] = {}  # noqa: N815
