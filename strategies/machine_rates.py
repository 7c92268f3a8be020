"""Rates of the machine that the ranks run on: out of the database, or measured now and stored."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import RateMeasurement, new_id, utc_now
from hardware_db.microbench.quick import quick_rates
from hardware_db.store import open_store
from planner import vocabulary as words
from planner.cluster import Rates
from planner.machine_rates import rates_from_measurements


def measured_rates(fingerprint: Fingerprint, device: torch.device, *, precision: words.Precision) -> Rates:
    """The rates of this machine for the world that runs, the same on every rank.

    Every rank must call this together. Where rank 0 finds nothing stored for this machine, these versions and this
    number of ranks, all measure for about two seconds and rank 0 stores what it measured.

    Raises:
        DsplanError: the database cannot be read or written.
    """
    stored = _from_rank_zero(_read(fingerprint) if _rank() == 0 else ())
    if not stored:
        measured = _measure(fingerprint, device)
        if _rank() == 0:
            with open_store() as store:
                store.add(*measured)
        stored = _from_rank_zero(measured)
    return rates_from_measurements(stored, ranks=_world_size(), precision=precision)


def _read(fingerprint: Fingerprint) -> tuple[RateMeasurement, ...]:
    with open_store() as store:
        return tuple(rate for rate in store.rates(fingerprint.key) if rate.ranks == _world_size())


def _measure(fingerprint: Fingerprint, device: torch.device) -> tuple[RateMeasurement, ...]:
    return tuple(
        RateMeasurement(
            id=new_id(),
            created_at=utc_now(),
            kind=rate.kind,
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


def _from_rank_zero(rates: tuple[RateMeasurement, ...]) -> tuple[RateMeasurement, ...]:
    """Rank 0's value, on every rank."""
    if _world_size() == 1:
        return rates
    box: list[object] = [rates]
    dist.broadcast_object_list(box, src=0)
    received = box[0]
    return received if isinstance(received, tuple) else ()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
