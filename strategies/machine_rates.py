"""Rates of the machine that the ranks run on: out of the database, or measured now and stored."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import RateMeasurement, new_id, utc_now
from hardware_db.microbench.quick import quick_rates
from hardware_db.store import open_store
from strategies.agree import on_rank_zero


def machine_rates(fingerprint: Fingerprint, device: torch.device) -> tuple[RateMeasurement, ...]:
    """What was measured of this machine with as many ranks as run now, newest first, the same on every rank.

    Every rank must call this together. Where rank 0 finds nothing stored for this machine, these versions and this
    number of ranks, all measure for about two seconds and rank 0 stores what it measured.

    Raises:
        DsplanError: the database cannot be read or written.
    """
    stored = on_rank_zero(lambda: _read(fingerprint))
    if not stored:
        measured = _measure(fingerprint, device)
        stored = on_rank_zero(lambda: _store(measured))
    return stored


def _read(fingerprint: Fingerprint) -> tuple[RateMeasurement, ...]:
    with open_store() as store:
        return tuple(rate for rate in store.rates(fingerprint.key) if rate.ranks == _world_size())


def _store(measured: tuple[RateMeasurement, ...]) -> tuple[RateMeasurement, ...]:
    with open_store() as store:
        store.add(*measured)
    return measured


def _measure(fingerprint: Fingerprint, device: torch.device) -> tuple[RateMeasurement, ...]:
    return tuple(
        RateMeasurement(
            id=new_id(),
            created_at=utc_now(),
            operation=rate.operation,
            value=rate.value,
            unit=rate.unit,
            dtype=rate.dtype,
            size=rate.size,
            ranks=rate.ranks,
            fingerprint=fingerprint,
            source="run",
        )
        for rate in quick_rates(device)
    )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
