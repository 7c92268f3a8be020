"""Widths of intervals come from published runs, hold groups that were left out, and reach the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from planner.calibration.spread import interval
from planner.cost.intervals import (
    ANY_OTHER,
    SMALL_BATCH,
    TABLE,
    Extrapolation,
    Stratum,
    memory_headroom,
    read_tables,
    step_half_width,
    stratum_of,
    widest_half_width,
)
from planner.cost.memory.estimate import memory_estimate
from scripts.fit.asked import Desk, questions
from scripts.fit.interval_rows import AXES, Row, headroom, near_and_far, needed_bytes, read_rows
from scripts.fit.intervals import (
    ALL,
    COVERAGE,
    FIGURES,
    Coverage,
    coverage,
    coverage_text,
    document,
    fitted,
    left_out,
    missing,
    quantile,
    read_coverage,
    scores,
    widths,
)
from tests.planner.cost.timing.cases import cluster, make_job, run_by

ROWS = read_rows()
KEPT = read_coverage()
H100 = {"device": "H100-SXM5-80GB", "intra": "nvlink4-h100"}


def row(code: str, publication: str, off: float, *, under: str = "", gpus: int = 8, parameters: int = 10**9) -> Row:
    stratum = Stratum(regime="plain", code=code, architecture="ampere", parameters=parameters, gpus=gpus)
    return Row(
        case=f"{publication}-{off}-{gpus}",
        publication=publication,
        reading="stated",
        code=code,
        under=under or code,
        stratum=stratum,
        time=dict.fromkeys(AXES, off),
        shipped=off,
        memory=off,
        room=off,
    )


def test_what_the_planner_reads_is_what_the_rows_say() -> None:
    """If this fails rows or code have changed: run scripts/fit/intervals.py."""
    by_figure = {figure: fitted(ROWS, figure) for figure in FIGURES}
    assert TABLE.read_text() == document({name: table for name, (table, _) in by_figure.items()}, ROWS) + "\n"
    covered = [one for name, (_, held) in by_figure.items() for axis in AXES for one in coverage(held[axis], name)]
    assert COVERAGE.read_text() == coverage_text(covered)


@pytest.mark.parametrize("total", [one for one in KEPT if one.group == ALL], ids=lambda one: f"{one.figure}-{one.axis}")
def test_nine_of_ten_runs_left_out_stay_inside(total: Coverage) -> None:
    assert total.weighted >= 0.85
    assert total.runs > 50


def test_no_publication_weighs_more_than_ten_runs() -> None:
    long = [row("a", "long", 0.1) for _ in range(99)]
    short = [row("a", "short", 2.0) for _ in range(10)]
    weighted = scores([*long, *short], "time")
    assert sum(score.weight for score in weighted[:99]) == pytest.approx(sum(score.weight for score in weighted[99:]))
    assert quantile([(1.0, 1.0), (2.0, 1.0), (9.0, 0.1)], 0.9) == 2.0


def publication(code: str, name: str, off: float, *, under: str = "") -> list[Row]:
    """Ten runs that are off by as much."""
    return [row(code, name, off, under=under) for _ in range(10)]


def crossed(off: float) -> list[Row]:
    """Runs of three code bases, predicted as each other."""
    return [
        one
        for code in "xyz"
        for under in "xyz"
        if code != under
        for one in publication(code, code + "1", off, under=under)
    ]


def test_a_code_base_without_runs_is_as_wide_as_code_bases_differ() -> None:
    two = [*publication("x", "x1", 0.1), *publication("x", "x2", 0.1)]
    table = widths(scores([*two, *crossed(0.4)], "time"), "time")
    assert table.regimes["plain"].width == 0.1
    assert table.of(replace(two[0].stratum, code="never published")) == pytest.approx(0.4)
    # Two publications of its own and one of what code bases differ by: nine tenths of three are more than two.
    assert table.of(two[0].stratum) == pytest.approx(0.4)
    many = [one for number in range(20) for one in publication("x", f"more{number}", 0.1)]
    table = widths(scores([*two, *many, *crossed(0.4)], "time"), "time")
    assert table.of(two[0].stratum) == pytest.approx(0.1)
    assert (table.codes["x"].publications, table.codes["x"].runs) == (22, 220)


def test_a_group_that_is_left_out_widens_the_others() -> None:
    near = [one for number in range(4) for one in publication("x", f"near{number}", 0.1)]
    far = publication("x", "far", 0.3)
    held = left_out([*near, *far, *crossed(0.1)], "time", "publication", {})
    over = {one.group: one.over for one in held}
    assert over["far"] == pytest.approx(3.0)
    assert missing(held, "time") == pytest.approx(3.0)
    others = [one for one in held if one.group != "far"]
    assert missing(others, "time") == 1.0
    # Held against the factor of the others, in which it has no part, it stays outside.
    (own,) = (one for one in coverage(held, "time") if one.group == "far")
    assert own.inside == 0.0
    assert own.width == pytest.approx(math.exp(2 * 0.1))


def test_sizes_beyond_what_was_published_widen() -> None:
    table = read_tables(TABLE)["time"]
    far = {"more GPUs": (2.0, 10.0), "larger model": (3.0, 10.0), "device": (1.5, 1.0)}
    wider = {name: Extrapolation(wider=factor, ratio=ratio) for name, (factor, ratio) in far.items()}
    table = replace(table, beyond={**table.beyond, **wider})
    usual = Stratum(regime="plain", code="llm-foundry", architecture="ampere", parameters=10**9, gpus=64)
    base, most = table.of(usual), table.codes["llm-foundry"].gpus[1]
    assert table.of(replace(usual, gpus=10**5)) == pytest.approx(2 * base)
    assert table.of(replace(usual, gpus=most)) == pytest.approx(base)
    # Half as far in logarithms as what the factor was found for counts with its root.
    assert table.of(replace(usual, gpus=round(most * 10**0.5))) == pytest.approx(2**0.5 * base, rel=1e-3)
    assert table.of(replace(usual, gpus=10**5, parameters=10**13)) == pytest.approx(3 * base)
    assert table.of(replace(usual, architecture="unheard of")) == pytest.approx(1.5 * base)
    assert near_and_far([1, 2, 3, 4, 5, 6]) == (3, 4)


def test_jobs_have_the_width_of_their_work() -> None:
    node = make_job("llama-3.2-1b", cluster(8, **H100), micro_batch_size=4, sequence_length=2048)
    assert stratum_of(node).regime == "plain"
    regimes = {
        "small batch": make_job("llama-3.2-1b", cluster(8, **H100), sequence_length=SMALL_BATCH // 2),
        "8 bits": make_job("llama-3.2-1b", cluster(8, **H100), sequence_length=4096, precision="fp8"),
        "offload": make_job("llama-3.2-1b", cluster(8, **H100), strategy="zero3", offload="optimizer"),
        "experts": make_job("mixtral-8x7b", cluster(8, **H100), sequence_length=4096),
        "adapters": replace(node, workload=replace(node.workload, method="lora")),
    }
    table = read_tables(TABLE)["time"]
    for name, job in regimes.items():
        assert stratum_of(job).regime == name
        assert step_half_width(job) == pytest.approx(table.of(stratum_of(job)))
        assert step_half_width(job) <= widest_half_width(job.facts, job.workload)
    low, high = interval(node, 1.0, None)
    assert math.log(high) == pytest.approx(-math.log(low)) == pytest.approx(step_half_width(node))


def test_a_code_base_that_nothing_was_published_of_is_told_apart() -> None:
    """Nanotron has no published step behind it; NeMo has, and Megatron-LM runs the same modules."""
    job = make_job("llama-3.2-1b", cluster(8, **H100), micro_batch_size=4, sequence_length=2048)
    published = read_tables(TABLE)["time"].codes
    assert "nanotron" not in published
    assert step_half_width(run_by(job, "nanotron")) > 1.2 * step_half_width(run_by(job, "megatron"))
    assert step_half_width(run_by(job, "megatron")) == step_half_width(run_by(job, "nemo"))
    assert published[ANY_OTHER].factor > published["nemo"].factor
    assert step_half_width(run_by(job, "torchtitan-2024")) == step_half_width(run_by(job, "torchtitan"))


def test_room_for_a_cache_is_not_what_decides() -> None:
    job = make_job("llama-3.2-1b", cluster(8, **H100), micro_batch_size=4, sequence_length=2048)
    room = memory_headroom(job)
    assert 0 < room.crowded <= room.roomy
    assert memory_headroom(run_by(job, "nanotron")).crowded > memory_headroom(run_by(job, "megatron")).crowded


def test_a_run_below_what_is_said_to_be_used_needs_no_headroom() -> None:
    from tests.planner.cost.memory.test_overhead import job_of

    memory = memory_estimate(job_of("fsdp"))
    assert headroom(2 * memory.device_used_bytes, memory, "nvidia-smi") == pytest.approx(
        math.log(2 * memory.device_used_bytes / memory.device_needed_bytes)
    )
    assert headroom(memory.peak_reserved_bytes, memory, "reserved") <= 0.0
    over = math.log(memory.peak_reserved_bytes / needed_bytes(memory, "allocated"))
    assert headroom(memory.peak_reserved_bytes, memory, "allocated") == pytest.approx(over)
    assert over > 0


def test_rows_are_of_the_models_as_they_are(tmp_path: Path) -> None:
    """If this fails the time or the memory model has changed: run scripts.fit.intervals with --anew."""
    by_case, desk = {one.case: one for one in questions()}, Desk(tmp_path)
    for kept in [one for one in ROWS if one.is_own][::50]:
        one = by_case[kept.case]
        _, plan = desk.priced(one)
        if not math.isnan(kept.shipped):
            ratio = plan.throughput.tokens_per_second_per_gpu / one.tokens_per_s_per_gpu
            assert math.log(ratio) == pytest.approx(kept.shipped, abs=0.02), kept.case
        if not math.isnan(kept.memory):
            assert headroom(one.memory_bytes, plan.memory, one.kind) == pytest.approx(kept.memory, abs=0.02), kept.case
