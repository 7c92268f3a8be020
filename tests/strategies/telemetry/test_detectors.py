"""Each detector finds what it is for, once, and leaves real runs alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from strategies.config.values import MonitorSettings
from strategies.telemetry.detectors import LOSS_SPIKE_MARGIN, MEMORY_GROWTH, SLOWDOWN_RATIO, SortedWindow
from strategies.telemetry.machine import SAMPLE_SECONDS
from tests.strategies.telemetry.rows import alerts_of, curve, step_row

MIB = 2**20


@pytest.mark.parametrize("name", ["language", "classifier"])
def test_a_real_noisy_run_raises_no_alert(name: str) -> None:
    rows = list(curve(name))
    assert len(rows) >= 4000
    assert alerts_of(rows) == []


@pytest.mark.parametrize("start", range(600, 5600, 500))
def test_a_loss_that_doubles_is_found_within_five_steps(start: int) -> None:
    rows = list(curve("language"))[: start + 20]
    for row in rows[start:]:
        row["loss"] *= 2.5
    (alert,) = alerts_of(rows)
    assert (alert.kind, alert.metric, alert.rank) == ("loss_spike", "loss", 3)
    assert start < alert.step <= start + 5
    assert alert.value is not None
    assert alert.limit is not None
    assert alert.value > alert.limit
    assert f"rose to {alert.value:.4g}" in alert.message


def test_a_single_bad_batch_is_no_spike() -> None:
    rows = list(curve("classifier"))
    for row in rows[1000::97]:
        row["loss"] = 30.0
    assert alerts_of(rows) == []


def test_a_spike_is_reported_again_after_it_was_over() -> None:
    losses = [1.0 + 0.01 * (step % 7) for step in range(300)]
    losses[100:110] = losses[200:210] = [5.0] * 10
    rows = [step_row(step, loss=loss) for step, loss in enumerate(losses)]
    assert [alert.step for alert in alerts_of(rows)] == [103], "the second lies within what the window has seen"
    far = [*losses[:110], *losses[:90] * 3, *[5.0] * 5]
    assert [alert.step for alert in alerts_of(step_row(at, loss=loss) for at, loss in enumerate(far))][0::1] == [
        103,
        383,
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_reported_once_until_it_is_over(bad: float) -> None:
    losses = [2.0, bad, bad, bad, 2.0, bad]
    alerts = alerts_of(step_row(step, loss=loss) for step, loss in enumerate(losses))
    assert [(alert.kind, alert.step, alert.value) for alert in alerts] == [
        ("not_finite", 2, None),
        ("not_finite", 6, None),
    ]
    assert alerts[0].message == f"loss is {bad}"


def test_a_run_without_losses_is_watched_all_the_same() -> None:
    assert alerts_of(step_row(step, loss=None) for step in range(300)) == []


def test_steps_that_become_slow_are_reported_once() -> None:
    noise = random.Random(0)
    rows = [step_row(step, seconds=noise.gauss(1, 0.1) * (2 if step > 400 else 1)) for step in range(900)]
    (alert,) = alerts_of(rows)
    assert (alert.kind, alert.metric) == ("slowdown", "seconds")
    assert 420 < alert.step < 450
    assert alert.value == pytest.approx(2, rel=0.1)
    assert alert.message.startswith("steps take 2.0")


def test_pauses_and_longer_batches_are_no_slowdown() -> None:
    paused = [step_row(step, seconds=30.0 if step % 40 == 0 else 0.5) for step in range(1500)]
    assert alerts_of(paused) == []
    longer = [step_row(step, seconds=1 + step / 500, tokens=256 + 256 * step // 500) for step in range(1500)]
    assert alerts_of(longer) == []


@pytest.mark.parametrize("metric", ["private_bytes", "allocated_bytes"])
def test_memory_that_grows_without_a_pause_is_reported_once(metric: str) -> None:
    alerts = alerts_of(step_row(step, **_memory(metric, 2000 * MIB + step * MIB)) for step in range(3000))
    assert [(alert.kind, alert.metric) for alert in alerts] == [("memory_creep", metric)]
    assert "without a pause, 60.0 MiB a minute" in alerts[0].message


def test_a_leak_that_is_slow_is_found_in_the_end() -> None:
    alerts = alerts_of(step_row(step, private_bytes=2000 * MIB + step * MIB // 20) for step in range(12000))
    assert [alert.kind for alert in alerts] == ["memory_creep"]


def test_caches_that_fill_and_memory_that_swings_are_no_creep() -> None:
    filled = (step_row(step, private_bytes=(2000 + 500 * min(1, step / 250)) * MIB) for step in range(3000))
    assert alerts_of(filled) == []
    swinging = (step_row(step, private_bytes=(2000 + 400 * math.sin(step / 60)) * MIB) for step in range(6000))
    assert alerts_of(swinging) == []


def test_a_detector_can_be_switched_off() -> None:
    off = MonitorSettings(loss_spike=0, slowdown=0, memory_growth=0)
    rows = [
        step_row(step, loss=1.0 + 50 * (step > 400), seconds=1 + 9 * (step > 400), private_bytes=step * 100 * MIB)
        for step in range(900)
    ]
    assert alerts_of(rows, off) == []
    assert {alert.kind for alert in alerts_of(rows)} == {"loss_spike", "slowdown", "memory_creep"}


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("sample_seconds", SAMPLE_SECONDS),
        ("loss_spike", LOSS_SPIKE_MARGIN),
        ("slowdown", SLOWDOWN_RATIO),
        ("memory_growth", MEMORY_GROWTH),
    ],
)
def test_the_page_of_the_config_has_the_defaults(name: str, default: float) -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "config.md"
    assert f"`{name}` ({default:g})" in page.read_text()


def test_a_window_has_the_order_of_its_last_values() -> None:
    numbers = random.Random(1)
    values = [float(numbers.randrange(20)) for _ in range(500)]
    window = SortedWindow(31)
    for end, value in enumerate(values, start=1):
        window.add(value)
        last = values[max(0, end - 31) : end]
        assert len(window) == len(last)
        assert window.highest == max(last)
        if len(last) % 2:
            assert window.median == median(last)


def _memory(metric: str, value: int) -> dict[str, Any]:
    return {"private_bytes": 1000 * MIB, "allocated_bytes": 1000 * MIB, metric: value}
