"""The conformance suite of the Store contract; every kind of store runs all of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from hardware_db.errors import DsplanError
from hardware_db.files import canonical_json
from hardware_db.measurement import OUTCOMES, HardwareKind, Measured, Predicted
from hardware_db.store import Store
from tests.hardware_db.store.records import (
    A100,
    FROZEN_RATE,
    FROZEN_RUN,
    LAPTOP,
    calibration,
    measurement,
    plan,
    rate,
    report,
    trace,
)


def test_what_comes_out_equals_what_went_in(store: Store) -> None:
    first = measurement(1)
    bare = measurement(2, measured=Measured(), predicted=Predicted(), fingerprint=LAPTOP)
    assert store.add(first, bare) == 2
    assert store.get(first.id) == first
    assert store.get(bare.id) == bare


def test_rates_come_out_as_they_went_in(store: Store) -> None:
    full, bare = rate(1), rate(2, dtype="", size=None, ranks=1, fingerprint=LAPTOP)
    assert store.add(full, bare) == 2
    assert store.rates() == (bare, full)
    assert store.rates(A100.key) == (full,)
    assert store.rates(LAPTOP.machine.key) == (bare,)


def test_changing_a_returned_plan_does_not_reach_the_store(store: Store) -> None:
    store.add(measurement(1))
    store.get(f"{1:032x}").plan["model"] = {"name": "changed"}
    assert store.get(f"{1:032x}").model == "opt-125m"


def test_a_known_id_is_skipped_and_keeps_its_first_record(store: Store) -> None:
    first = measurement(1)
    assert store.add(first) == 1
    assert store.add(replace(first, outcome="failed"), measurement(2)) == 1
    assert store.get(first.id) == first
    assert store.count() == 2
    assert store.add(rate(1)) == 1
    assert store.add(rate(1)) == 0


def test_a_forgotten_run_is_gone_and_the_others_stay(store: Store) -> None:
    first, second = measurement(1), measurement(2)
    store.add(first, second, rate(1))
    assert store.forget(first.id) == first
    assert store.list() == (second,)
    assert store.rates() == (rate(1),)
    with pytest.raises(DsplanError, match="no measurement has an id that starts with"):
        store.forget(first.id)
    store.add(measurement(3))
    with pytest.raises(DsplanError, match="several measurements"):
        store.forget("0")
    assert store.count() == 2


def test_an_empty_store_answers(store: Store) -> None:
    assert store.list() == ()
    assert store.rates() == ()
    assert store.count() == 0
    assert store.find("0" * 32, A100.key) is None
    assert store.add() == 0


def test_list_comes_newest_first_and_is_cut_at_the_limit(store: Store) -> None:
    records = [measurement(number) for number in (2, 1, 3)]
    tied = measurement(4, created_at=records[2].created_at)
    store.add(*records, tied)
    assert store.list() == (tied, records[2], records[0], records[1])
    assert store.list(limit=2) == (tied, records[2])
    assert store.list(limit=9) == store.list()


def test_list_filters_by_model_in_any_case(store: Store) -> None:
    store.add(measurement(1), measurement(2, plan_json=canonical_json(plan(model="llama-3-8b"))))
    assert [stored.model for stored in store.list(model="LLaMA-3-8B")] == ["llama-3-8b"]
    assert store.list(model="llama") == ()


def test_list_filters_by_strategy_outcome_and_all_together(store: Store) -> None:
    for number, outcome in enumerate(OUTCOMES, 1):
        store.add(measurement(number, outcome=outcome))
    store.add(measurement(9, plan_json=canonical_json(plan(strategy="zero3")), outcome="failed"))
    assert [stored.id for stored in store.list(strategy="zero3")] == [f"{9:032x}"]
    assert [stored.outcome for stored in store.list(outcome="out_of_memory")] == ["out_of_memory"]
    assert len(store.list(outcome="failed")) == 2
    assert len(store.list(model="opt-125m", strategy="ddp", fingerprint=A100.key, outcome="failed")) == 1


def test_list_filters_by_the_size_of_the_model(store: Store) -> None:
    larger = plan()
    larger["model"] = {"name": "opt-350m", "parameters": 331_196_416}
    nameless = plan()
    nameless["model"] = {"name": "something"}
    store.add(measurement(1), measurement(2, plan_json=canonical_json(larger)))
    store.add(measurement(3, plan_json=canonical_json(nameless)))
    assert [stored.model for stored in store.list(parameters=331_196_416)] == ["opt-350m"]
    assert store.list(parameters=7) == ()


def test_list_filters_by_machine_with_or_without_its_versions(store: Store) -> None:
    newer = replace(A100, versions=replace(A100.versions, torch="2.13.0"))
    old, new = measurement(1), measurement(2, fingerprint=newer)
    store.add(old, new, measurement(3, fingerprint=LAPTOP))
    assert store.list(fingerprint=A100.key) == (old,)
    assert store.list(fingerprint=newer.key) == (new,)
    assert store.list(fingerprint=A100.machine.key) == (new, old)
    assert store.list(fingerprint=A100.versions.key) == ()
    assert store.list(fingerprint=A100.machine.key[:6]) == ()


def test_find_gives_the_newest_run_of_that_plan_on_that_machine(store: Store) -> None:
    other_plan = canonical_json(plan(micro_batch_size=8))
    old, new, elsewhere, other = (
        measurement(1),
        measurement(2, outcome="out_of_memory"),
        measurement(3, fingerprint=LAPTOP),
        measurement(4, plan_json=other_plan),
    )
    store.add(old, new, elsewhere, other)
    assert store.find(old.plan_key, A100.key) == new
    assert store.find(other.plan_key, A100.machine.key) == other
    assert store.find(other.plan_key, LAPTOP.key) is None


def test_get_takes_an_unambiguous_prefix(store: Store) -> None:
    one, two = measurement(1, id="a1" + "0" * 30), measurement(2, id="a2" + "f" * 30)
    store.add(one, two)
    assert store.get("a1") == one
    assert store.get("a2f") == two


@pytest.mark.parametrize("prefix", ["b", "%", "a%", "_", "'", "A1", "g", "a1" + "0" * 31])
def test_get_of_nothing_says_where_to_look(store: Store, prefix: str) -> None:
    store.add(measurement(1, id="a1" + "0" * 30))
    with pytest.raises(DsplanError, match=r"no measurement .* see `dsplan db list`"):
        store.get(prefix)


@pytest.mark.parametrize("prefix", ["a", ""])
def test_get_of_several_names_two(store: Store, prefix: str) -> None:
    one, two = measurement(1, id="a1" + "0" * 30), measurement(2, id="a2" + "f" * 30)
    store.add(one, two)
    with pytest.raises(DsplanError, match=r"several measurements") as caught:
        store.get(prefix)
    assert one.id in str(caught.value)
    assert two.id in str(caught.value)


def test_closing_twice_is_harmless(store: Store) -> None:
    store.close()
    store.close()


def test_a_plan_with_any_text_survives(store: Store) -> None:
    name = "modèle-Ψ'\"; DROP TABLE measurements; --"
    store.add(measurement(1, plan_json=canonical_json(plan(model=name))))
    assert store.list(model=name)[0].plan == json.loads(canonical_json(plan(model=name)))


def test_a_trace_is_kept_under_its_key_and_its_series(store: Store) -> None:
    first, second, other = trace(1), trace(2), trace(3, series="b" * 32)
    assert [store.add_trace(each) for each in (first, second, other)] == [True, True, True]
    assert store.trace(first.key) == first
    assert store.trace(first.key).document == {"phases": {"loss": 1}}  # type: ignore[union-attr]
    assert store.traces(first.series) == (second, first)
    assert store.traces("c" * 32) == ()
    assert store.trace("c" * 32) is None
    assert store.count() == 0


def test_a_trace_that_is_there_stays_as_it_is(store: Store) -> None:
    first = trace(1)
    assert store.add_trace(first)
    assert not store.add_trace(replace(first, document_json="{}"))
    assert store.trace(first.key) == first


def test_shapes_repeats_and_intervals_come_out_as_they_went_in(store: Store) -> None:
    assert store.add(FROZEN_RATE, FROZEN_RUN) == 2
    assert store.rates() == (FROZEN_RATE,)
    assert store.get(FROZEN_RUN.id) == FROZEN_RUN


def test_the_newest_calibration_of_a_kind_of_hardware_is_in_force(store: Store) -> None:
    laptop = HardwareKind(device="laptop")
    old, new, other = calibration(1), calibration(2), calibration(3, laptop)
    for each in (new, old, other, replace(new, document_json="{}")):
        store.add_calibration(each)
    assert store.calibration(new.hardware) == new
    assert store.calibration(laptop) == other
    assert store.calibration(HardwareKind(device="laptop", inter_link="eth-25")) is None
    assert store.calibrations() == (other, new, old)
    assert store.count() == 0


def test_a_run_has_one_report_which_the_next_replaces(store: Store) -> None:
    bare = dict.fromkeys(("steps", "loss", "step_seconds", "tokens_per_second", "peak_bytes", "usd_per_hour"))
    bare |= dict.fromkeys(("checkpoint_step", "checkpoint_age_seconds", "quiet_seconds"))
    first, other = report(1), report(2, state="ended", outcome="completed", user="", alerts_json="{}", **bare)
    store.report(first)
    store.report(other)
    assert store.reports() == (other, first)
    later = report(1, step=150, loss=2.25, state="stalled", host="node8")
    store.report(later)
    assert store.reports() == (later, other)
    assert store.reports(limit=1) == (later,)
    assert store.reports()[0].alerts == {"loss_spike": 2}
    assert (store.count(), store.list()) == (0, ())


def test_reports_are_as_old_as_the_store_says(store: Store) -> None:
    store.report(report(1))
    time.sleep(0.05)
    store.report(report(2))
    new, old = store.reports()
    assert (new.id, old.id) == (report(2).id, report(1).id)
    assert 0 <= new.heard_seconds_ago < new.heard_seconds_ago + 0.04 < old.heard_seconds_ago < 30


def test_names_of_any_text_stay_as_they_are(store: Store) -> None:
    odd = report(1, name="läuf'; DROP TABLE reports; --", model="modèle-Ψ%s ?", host="")
    store.report(odd)
    assert store.reports() == (odd,)
