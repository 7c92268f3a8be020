"""Export and import: round trips, strictness, all or nothing."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.measurement import Measured, Predicted
from hardware_db.store import MemoryStore, Store
from hardware_db.store.transfer import export_text, from_document, import_file, to_document
from tests.hardware_db.store.records import FROZEN_RATE, FROZEN_RUN, LAPTOP, measurement, rate

RECORDS = (
    measurement(1, source="shipped:paper, table 2"),
    measurement(2, source="import", measured=Measured(), predicted=Predicted(), fingerprint=LAPTOP),
    rate(1, source="import"),
    rate(2, source="import", dtype="", size=None, ranks=1),
)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A file with RECORDS."""
    source = MemoryStore()
    source.add(*RECORDS)
    path = tmp_path / "export.jsonl"
    path.write_text(export_text(source), encoding="utf-8")
    return path


def test_a_round_trip_changes_nothing(store: Store, exported: Path) -> None:
    count = import_file(store, exported)
    assert (count.added, count.skipped) == (4, 0)
    assert export_text(store) == exported.read_text(encoding="utf-8")
    assert store.list() == (RECORDS[1], RECORDS[0])
    assert store.rates() == (RECORDS[3], RECORDS[2])


def test_importing_twice_skips_what_is_there(store: Store, exported: Path) -> None:
    store.add(RECORDS[0])
    count = import_file(store, exported)
    assert (count.added, count.skipped) == (3, 1)
    assert import_file(store, exported).skipped == 4


def test_a_run_from_elsewhere_becomes_an_import(store: Store, tmp_path: Path) -> None:
    elsewhere = MemoryStore()
    elsewhere.add(measurement(1), rate(1))
    path = tmp_path / "export.jsonl"
    path.write_text(export_text(elsewhere))
    import_file(store, path)
    assert store.list()[0].source == "import"
    assert store.rates()[0].source == "import"


def test_blank_lines_and_windows_line_ends_are_fine(store: Store, exported: Path, tmp_path: Path) -> None:
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\r\n" + exported.read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert import_file(store, windows).added == 4


def test_the_export_says_what_each_line_is() -> None:
    store = MemoryStore()
    store.add(*RECORDS)
    lines = [json.loads(line) for line in export_text(store).splitlines()]
    assert [(line["kind"], line["schema_version"]) for line in lines] == [("measurement", 1)] * 2 + [("rate", 1)] * 2
    assert lines[0]["plan"] == RECORDS[0].plan
    assert lines[0]["fingerprint"]["machine"]["device"] == "NVIDIA A100-SXM4-80GB"


def _line(number: int = 0, /, **changes: Any) -> str:
    return json.dumps({**to_document(RECORDS[number]), **changes})


def _in_plan(text: str) -> str:
    return _line().replace('"plan": {', f'"plan": {{"x": {text}, ', 1)


def _without(name: str) -> str:
    return json.dumps({key: value for key, value in to_document(RECORDS[0]).items() if key != name})


BROKEN = {
    "not JSON": ("{nonsense", "is not JSON"),
    "no object": ("[1]", "line is [1]; it must be an object"),
    "unknown kind": (_line(kind="run"), "kind is 'run'; it must be measurement or rate"),
    "newer schema": (_line(schema_version=2), "schema_version 2 is newer than 1, which this dsplan reads; upgrade it"),
    "odd schema": (_line(schema_version=True), "schema_version is True; it must be 1"),
    "unknown key": (_line(colour="red"), "colour is not a key; the keys are id, created_at"),
    "hidden key": (_line(plan_json="{}"), "plan_json is not a key; the plan is an object under plan"),
    "missing key": (_without("outcome"), "outcome is missing"),
    "missing plan": (_without("plan"), "plan is missing"),
    "plan is text": (_line(plan="x"), "plan is 'x'; it must be an object"),
    "unknown nested key": (_line(measured={"speed": 1}), "measured.speed is not a key"),
    "nested kind": (_line(measured={"steps": "3"}), "measured.steps is '3'; it must be a whole number"),
    "bool for int": (_line(measured={"steps": True}), "measured.steps is True; it must be a whole number"),
    "null for text": (_line(source=None), "source is None; it must be text"),
    "number for text": (_line(2, unit=3), "unit is 3; it must be text"),
    "text for number": (_line(2, value="fast"), "value is 'fast'; it must be a number"),
    "text for size": (_line(2, size="big"), "size is 'big'; it must be a whole number or null"),
    "huge number": (_line(2, value=10**400), "value is beyond any floating-point number"),
    "huge whole number": (_line(2, size=2**64), "rate.size is"),
    "negative": (_line(measured={"host_bytes": -1}), "measured.host_bytes is -1"),
    "unknown outcome": (_line(outcome="fine"), "outcome 'fine' is not one of"),
    "NaN": (_line(2, value=float("nan")), "NaN is not JSON"),
    "twice": ('{"kind": "rate", "kind": "rate"}', "kind appears twice"),
    "surrogate": (_line(source="\ud800"), "holds half of a surrogate pair"),
    "deep": ("[" * 100_000, "is nested too deep"),
    "deep and whole": ("[" * 5000 + "]" * 5000, "is nested too deep"),
    "deep in the plan": (_in_plan("[" * 200 + "]" * 200), "is nested too deep"),
    "beyond floats in the plan": (_in_plan("1e400"), "a number is beyond any floating-point number"),
    "thousands of digits": (_in_plan("1" * 5000), "holds a number that is too long"),
    "no fingerprint": (_line(fingerprint={"machine": {}}), "fingerprint.versions is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.sweep(every=3)
def test_a_broken_line_is_named_and_nothing_is_imported(store: Store, exported: Path, case: str) -> None:
    line, problem = BROKEN[case]
    exported.write_text(exported.read_text() + line + "\n", encoding="utf-8")
    with pytest.raises(BrokenFile) as caught:
        import_file(store, exported)
    message = str(caught.value)
    assert message.startswith(f"{exported}, line 5: {problem}")
    assert message.endswith("; correct or remove the line; nothing was imported")
    assert len(message.splitlines()) == 1
    assert (store.list(), store.rates()) == ((), ())


def test_files_that_cannot_be_read(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="cannot be read"):
        import_file(store, tmp_path)
    with pytest.raises(BrokenFile, match=r"missing\.jsonl: cannot be read"):
        import_file(store, tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    with pytest.raises(BrokenFile, match=re.escape("is not UTF-8 text (byte 3)")):
        import_file(store, tmp_path / "binary")
    for content in ("", "\n \n"):
        (tmp_path / "empty").write_text(content)
        with pytest.raises(BrokenFile, match="empty: holds no records; name a file"):
            import_file(store, tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BrokenFile, match=f"{endless.name}: is not a regular file"):
            import_file(store, endless)


def test_figures_left_out_take_their_defaults() -> None:
    document = to_document(RECORDS[0])
    document.pop("measured")
    document["predicted"] = {"step_seconds": 1}
    record = from_document(document)
    assert record == measurement(
        1, source=RECORDS[0].source, measured=Measured(), predicted=Predicted(step_seconds=1.0)
    )


def test_shapes_and_intervals_travel(store: Store, tmp_path: Path) -> None:
    source = MemoryStore()
    source.add(replace(FROZEN_RATE, source="import"), replace(FROZEN_RUN, source="import"))
    path = tmp_path / "export.jsonl"
    path.write_text(export_text(source))
    import_file(store, path)
    assert (store.rates(), store.list()) == (source.rates(), source.list())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (7, "shape is 7; it must be a list"),
        ([1, "2"], r"shape\[1\] is '2'; it must be a whole number"),
        ([8, 0], r"rate\.shape is \(8, 0\); every extent must be a whole number above 0"),
    ],
)
def test_a_shape_that_is_none_names_the_key(shape: object, message: str) -> None:
    with pytest.raises(DsplanError, match=message):
        from_document({**to_document(FROZEN_RATE), "shape": shape})
