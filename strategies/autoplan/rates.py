"""Rates of the machine that the ranks run on: out of the database, or measured now and stored."""

from __future__ import annotations

import torch

from hardware_db.fingerprint import Fingerprint, fingerprint
from hardware_db.measurement import RateMeasurement
from hardware_db.microbench.grid import Point, as_measurement, point_of
from hardware_db.microbench.runner import quick_rates, wanted_points
from hardware_db.microbench.timer import ranks_at_work
from hardware_db.store import ask_store
from strategies.distributed.consensus import on_rank_zero
from strategies.run_directory.machine import own_machine

_Rates = tuple[RateMeasurement, ...]


def machine_rates(device: torch.device, machine: Fingerprint | None = None) -> _Rates:
    """Return what was measured of this machine with as many ranks as run now, newest first, the same on every rank.

    Every rank must call this together. What rank 0 does not find stored for this machine, these versions and this
    number of ranks, all measure in two to three seconds, and rank 0 stores it. `dsplan bench` stores the same and more.
    A database that cannot be read or written stops no training: one line says so.
    """
    wanted, here = wanted_points(device), machine or fingerprint(own_machine())
    stored, missing = on_rank_zero(lambda: _read(here, wanted))
    if not missing:
        return stored
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the script's numbers stay as they were
        measured = tuple(as_measurement(rate, here, "run") for rate in quick_rates(missing, device))
    return on_rank_zero(lambda: _store(measured, stored))


def _read(machine: Fingerprint, wanted: tuple[Point, ...]) -> tuple[_Rates, tuple[Point, ...]]:
    """Return the stored rates, and the points among those wanted that none of them measured."""
    rates: _Rates = ask_store(lambda store: store.rates(machine.key), ())
    stored = tuple(rate for rate in rates if rate.ranks == ranks_at_work())
    measured = {point_of(rate) for rate in stored}
    return stored, tuple(point for point in wanted if point not in measured)


def _store(measured: _Rates, stored: _Rates) -> _Rates:
    ask_store(lambda store: store.add(*measured), 0)
    return (*reversed(measured), *stored)
