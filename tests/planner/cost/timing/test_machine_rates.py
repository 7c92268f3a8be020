"""Rows of the database become curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions
from hardware_db.measurement import RateMeasurement, new_id, utc_now
from planner.cluster.rates import rates_from_measurements
from planner.types.cluster import Curve, Rates, constant_rate, curve_of

LAPTOP = Fingerprint(machine=MachineIdentity(cpu="some", cores=2), versions=Versions())
SERVER = Fingerprint(machine=MachineIdentity(device="H100", device_count=8), versions=Versions())


def row(operation: str, value: float, *, on: Fingerprint = LAPTOP, **fields: object) -> RateMeasurement:
    return RateMeasurement(
        id=new_id(),
        created_at=utc_now(),
        operation=operation,
        value=value,
        unit="per second",
        fingerprint=on,
        source="bench",
        **fields,  # type: ignore[arg-type]
    )


def rates(*rows: RateMeasurement, ranks: int = 2) -> Rates:
    return rates_from_measurements(rows, ranks=ranks, precision="fp32")


def test_nothing_measured_makes_no_curves() -> None:
    assert rates() == Rates()


def test_products_are_read_at_their_operations() -> None:
    small = row("matmul", 1e9, shape=(10, 10, 10), dtype="fp32", ranks=2)
    square = row("matmul", 4e9, size=100, dtype="fp32", ranks=2)
    other = row("matmul", 9e9, shape=(99, 99, 99), dtype="bf16", ranks=2)
    curve = rates(small, square, other).matmul
    assert curve == Curve(points=((2e3, 2e-6), (2e6, 5e-4)))


def test_the_newest_row_counts() -> None:
    newest, older = (row("matmul", value, shape=(10, 10, 10), dtype="fp32", ranks=2) for value in (1e9, 2e9))
    assert rates(newest, older).matmul == Curve(points=((2e3, 2e-6),))


def test_attention_counts_the_forward_operations_of_both_passes() -> None:
    shape = (1, 2, 10, 4)
    measured = rates(
        row("attention", 3.2e6, shape=shape, dtype="fp32", ranks=2),
        row("attention_backward", 3.2e6, shape=shape, dtype="fp32", ranks=2),
    )
    assert measured.attention == Curve(points=((3200.0, 1e-3),))
    assert measured.attention_backward == Curve(points=((3200.0, 2.5e-3),))


def test_collectives_become_seconds_of_the_whole_tensor() -> None:
    measured = rates(
        row("all_reduce", 1e9, size=1_000_000, ranks=4),
        row("all_reduce_latency", 5e-5, size=4, ranks=4),
        row("all_gather", 1e9, size=1_000_000, ranks=4),
    ).collectives
    assert measured["all_reduce", 4] == Curve(points=((4.0, 5e-5), (1e6, pytest.approx(1.5e-3))))
    assert measured["all_gather", 4] == Curve(points=((1e6, pytest.approx(0.75e-3)),))


def test_bytes_and_parameters() -> None:
    measured = rates(
        row("memory", 1e9, size=500, ranks=2),
        row("cpu_adamw", 1e6, size=400, ranks=2),
        row("disk_read", 1e8, size=1000, ranks=2),
        row("launch", 3e-6, ranks=2),
    )
    assert measured.memory == Curve(points=((1e3, 1e-6),))
    assert measured.cpu_optimizer == Curve(points=((100.0, 1e-4),))
    assert measured.disk_read == Curve(points=((1000.0, 1e-5),))
    assert measured.launch_seconds == 3e-6


def test_ranks_share_a_cpu_but_not_a_gpu() -> None:
    alone = row("memory", 1e9, size=500, ranks=1)
    assert rates(alone).memory is None
    assert rates(row("memory", 1e9, on=SERVER, size=500, ranks=8)).memory is not None


def test_a_curve_is_straight_between_points_and_a_latency_or_a_rate_outside() -> None:
    curve = Curve(points=((10.0, 1.0), (1010.0, 3.0)))
    assert curve.seconds(1) == curve.seconds(10) == 1
    assert curve.seconds(510) == pytest.approx(2)
    assert curve.seconds(10100) == pytest.approx(30)
    assert curve.rate(510) == pytest.approx(255)


def test_a_point_alone_is_a_rate_at_every_size() -> None:
    assert Curve(points=((10.0, 1.0),)).seconds(1) == pytest.approx(0.1)
    assert constant_rate(5.0).seconds(20) == pytest.approx(4)


def test_points_come_in_any_order_and_none_make_no_curve() -> None:
    assert curve_of([(2.0, 4.0), (1.0, 3.0), (2.0, 9.0), (0.0, 1.0)]) == Curve(points=((1.0, 3.0), (2.0, 4.0)))
    assert curve_of([]) is None


def test_less_work_takes_no_more_time() -> None:
    assert curve_of([(1.0, 5.0), (2.0, 9.0), (3.0, 4.0), (4.0, 6.0)]) == Curve(
        points=((1.0, 4.0), (2.0, 4.0), (3.0, 4.0), (4.0, 6.0))
    )


def test_a_database_that_cannot_be_used_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path))
    (tmp_path / "dsplan.db").write_text("no database")
    torch = pytest.importorskip("torch")
    from hardware_db.microbench.runner import quick_rates
    from strategies.autoplan import live as machine_rates

    monkeypatch.setattr(machine_rates, "quick_rates", lambda points, device: quick_rates(points[:1], device))
    measured = machine_rates.machine_rates(torch.device("cpu"), LAPTOP)
    assert measured
    assert all(rate.value > 0 for rate in measured)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dsplan: continuing without the database: {tmp_path / 'dsplan.db'}: is not a SQLite")
