"""`dsplan bench` on the command line: what it refuses, what it writes, and what it prints of a benchmark."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsplan.__main__ import main
from dsplan.diagnostics.bench.benchmark import BenchReport
from dsplan.diagnostics.bench.cases import TrainingCase, request_of
from dsplan.diagnostics.bench.plan import BenchPlan, Wanted, load_bench_plan, make_bench_plan
from dsplan.diagnostics.bench.session import (
    Begun,
    Event,
    Measured,
    MeasuredElsewhere,
    Refused,
    Started,
    TimeIsUp,
    Waiting,
)
from dsplan.render.bench_view import BenchView, rate_words, report_blocks, report_to_dict, result_words, work_words
from dsplan.render.show import plain_text
from hardware_db.measurement import Measured as MeasuredFigures
from hardware_db.measurement import Measurement, measure_run
from hardware_db.microbench.grid import Point, Rate, as_measurement
from planner.cluster.resolve import probed_cluster
from planner.search.estimate import estimate
from planner.types.plan_io import plan_to_dict
from tests.dsplan.diagnostics.bench.samples import FINGERPRINT, LAPTOP, launches

PRODUCT = Point(operation="matmul", dtype="fp32", shape=(128, 256, 512), ranks=2)
Refuses = Callable[..., str]


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Refuses:
    """The one line that a command prints before it ends with status 2."""

    def run(*arguments: object) -> str:
        assert main(["bench", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("dsplan: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--ranks", "x"), "--ranks 'x' is not a number of processes"),
        (("--ranks", "1024"), "needs 1024 processes at once"),
        (("--minutes", "0"), "--minutes is 0.0; give a number from 0.001 to 100,000"),
        (("--minutes", "nan"), "--minutes is 'nan'; give a number from 0.001 to 100,000"),
        (("--only", "matmull"), "nearest: matmul"),
        (("--gpus", "4"), "describe hardware to --generate a plan for"),
        (("--model", "no-such-model"), "unknown model 'no-such-model'"),
        (("--plan", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--plan", "a.yaml", "--quick"), "--plan says what to measure"),
        (("--generate", "nowhere/a.yaml"), "nowhere/a.yaml: cannot be written"),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_line(
    arguments: tuple[str, ...], complaint: str, refuses: Refuses
) -> None:
    assert complaint in refuses(*arguments)


def test_a_plan_for_other_hardware_is_written_here_and_refused_here(
    tmp_path: Path, refuses: Refuses, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.yaml"
    flags = ["--gpu", "A100-SXM4-80GB", "--gpus", "8", "--model", "llama-2-7b", "--json"]
    assert main(["bench", "--generate", str(path), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = load_bench_plan(path)
    assert told == {"file": str(path), "points": len(plan.points), "training": len(plan.training)}
    assert plan.most_ranks == 8
    assert "is a benchmark of A100-SXM4-80GB and this machine has" in refuses("--plan", path)


def rate_event(point: Point = PRODUCT, spread: float = 0.25) -> Measured:
    rate = Rate(point=point, value=123.4e9, unit="FLOP/s", repeats=5, spread=spread)
    return Measured(work=point, record=as_measurement(rate, FINGERPRINT, "bench"))


def training_event(seconds: float | None = 0.5) -> Measured:
    cluster = probed_cluster(LAPTOP)
    case: TrainingCase = make_bench_plan(Wanted(ranks=(2,), kinds=("training",)), cluster).training[0]
    plan = estimate(request_of(case, cluster), case.configuration)
    measured = MeasuredFigures(step_seconds=seconds, steps=12)
    outcome = "completed" if seconds else "out_of_memory"
    return Measured(work=case, record=measure_run(plan_to_dict(plan), FINGERPRINT, outcome=outcome, measured=measured))


def report(**figures: object) -> BenchReport:
    summary = BenchReport(plan=BenchPlan(device="cpu", points=launches(4)), database=Path("db"), fingerprint="f")
    for name, figure in figures.items():
        setattr(summary, name, figure)
    return summary


def test_work_and_results_in_words() -> None:
    assert work_words(PRODUCT) == "matmul fp32 128x256x512, 2 ranks"
    assert work_words(Point(operation="host_to_device", size=1 << 20)) == "host to device 1.0 MiB, 1 rank"
    training = training_event()
    assert work_words(training.work) == "bench-llama-5m: ddp on 2 ranks, micro-batch 4 x 128, fp32"
    assert result_words(rate_event().record) == "123 GFLOP/s (samples differ by 25%)"
    assert result_words(training.record).startswith("500 ms per step, predicted ")
    assert result_words(training_event(None).record) == "out of memory"
    units = [rate_words(2.5e9, "bytes/s"), rate_words(1.5e12, "FLOP/s"), rate_words(2e-4, "s")]
    assert units == ["2.5 GB/s", "1.5 TFLOP/s", "200 us"]
    assert rate_words(1.4e9, "parameters/s") == "1.4B parameters/s"


def test_a_pipe_gets_a_line_for_every_result() -> None:
    out = io.StringIO()
    events: list[Event] = [
        Begun(total=4, stored=1),
        Started(work=PRODUCT),
        Waiting(),
        rate_event(),
        MeasuredElsewhere(work=PRODUCT),
        Refused(work=PRODUCT, reason="no such thing"),
        TimeIsUp(left=1),
    ]
    with BenchView(out=out, lines=True) as view:
        for event in events:
            view.show(event)
    assert out.getvalue().splitlines() == [
        "4 to measure, 1 of them stored already",
        "waiting for another dsplan bench",
        "matmul fp32 128x256x512, 2 ranks: 123 GFLOP/s (samples differ by 25%)",
        "matmul fp32 128x256x512, 2 ranks: not measured (no such thing)",
    ]


def test_nothing_but_the_object_is_printed_with_json() -> None:
    out = io.StringIO()
    with BenchView(out=out, lines=False) as view:
        view.show(Begun(total=4, stored=1))
        view.show(rate_event())
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_that_ends_empty() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with BenchView(out=out, lines=True) as view:
        for event in (Begun(total=2, stored=0), Started(work=PRODUCT), rate_event(), Waiting(), TimeIsUp(left=1)):
            view.show(event)
        view.show(Refused(work=PRODUCT, reason="no such thing"))
    assert "not measured (no such thing)" in out.getvalue()


def test_the_report_groups_rates_and_compares_runs() -> None:
    other = rate_event(replace(PRODUCT, shape=(8, 8, 8)), spread=0.75)
    refused = [Refused(work=PRODUCT, reason="no such thing")]
    summary = report(
        measured=[rate_event(), other, training_event()], refused=refused, stored=3, found=2, left=4, seconds=90.0
    )
    text = plain_text(report_blocks(summary))
    row = next(line for line in text.splitlines() if line.startswith("matmul"))
    assert row.split() == ["matmul", "fp32", "2", "2", "123", "GFLOP/s", "123", "GFLOP/s", "50%"]
    run = next(line for line in text.splitlines() if line.startswith("bench-llama-5m"))
    assert run.split()[:5] == ["bench-llama-5m", "ddp", "2", "500", "ms"]
    assert "not measured: matmul fp32 128x256x512, 2 ranks: no such thing" in text
    assert "3 measured in 90 s; 3 were stored before" in text
    assert "2 were measured by another dsplan bench meanwhile; 1 could not be measured; database db" in text
    assert "4 are left" in text


def test_the_object_holds_every_new_record() -> None:
    summary = report(measured=[rate_event(), training_event()], stored=1, seconds=1.5)
    document = json.loads(json.dumps(report_to_dict(summary), allow_nan=False))
    assert [record["kind"] for record in document["measured"]] == ["rate", "measurement"]
    assert document["measured"][0]["shape"] == [128, 256, 512]
    assert (document["wanted"], document["stored_before"], document["left"], document["seconds"]) == (4, 1, 0, 1.5)


def test_only_a_benchmark_that_found_nothing_at_all_fails() -> None:
    refused = [Refused(work=PRODUCT, reason="no such thing")]
    assert report(refused=refused).exit_code == 1
    assert report(refused=refused, measured=[rate_event()]).exit_code == 0
    assert report(refused=refused, stored=1).exit_code == 0
    assert report().exit_code == 0


def test_a_run_beside_its_prediction_keeps_both() -> None:
    record = training_event().record
    assert isinstance(record, Measurement)
    assert record.predicted.step_seconds
