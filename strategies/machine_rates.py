"""Rates of the machine that the ranks run on: out of the database, or measured now and stored."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch

from hardware_db.errors import DsplanError
from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import RateMeasurement
from hardware_db.microbench.point import Point
from hardware_db.microbench.quick import quick_rates, wanted_points
from hardware_db.microbench.rate import as_measurement, point_of
from hardware_db.microbench.timer import ranks_at_work
from hardware_db.store import open_store
from strategies.agree import on_rank_zero

_Rates = tuple[RateMeasurement, ...]


def machine_rates(fingerprint: Fingerprint, device: torch.device) -> _Rates:
    """What was measured of this machine with as many ranks as run now, newest first, the same on every rank.

    Every rank must call this together. What rank 0 does not find stored for this machine, these versions and this
    number of ranks, all measure in two to three seconds, and rank 0 stores it. `dsplan bench` stores the same and more.
    Where there is no database that can be used, it says so, and measures again the next time.
    """
    wanted = wanted_points(device)
    stored, missing = on_rank_zero(lambda: _read(fingerprint, wanted))
    if not missing:
        return stored
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the script's numbers stay as they were
        measured = tuple(as_measurement(rate, fingerprint, "run") for rate in quick_rates(missing, device))
    return on_rank_zero(lambda: _store(measured, stored))


def _read(fingerprint: Fingerprint, wanted: tuple[Point, ...]) -> tuple[_Rates, tuple[Point, ...]]:
    """The stored rates, and the points among those wanted that none of them measured."""
    try:
        with open_store() as store:
            stored = tuple(rate for rate in store.rates(fingerprint.key) if rate.ranks == ranks_at_work())
    except DsplanError as problem:
        print(f"dsplan: {problem}; planned without what it knows", file=sys.stderr, flush=True)
        return (), wanted
    known = {point_of(rate) for rate in stored}
    return stored, tuple(point for point in wanted if point not in known)


def _store(measured: _Rates, stored: _Rates) -> _Rates:
    with suppress(DsplanError), open_store() as store:  # said when it was to be read
        store.add(*measured)
    return (*reversed(measured), *stored)
