"""Reads what `dsplan bench` measured on the machine of shipped step times into rows of `measurements/rates_*.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from hardware_db.files import replace_text
from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions
from hardware_db.measurement import RateMeasurement, new_id, utc_now

_COLUMNS = ("operation", "dtype", "shape", "size", "ranks", "value", "unit", "repeats", "spread")
_PLACE = ("device", "cpu", "cores", "torch")


def read_rates(path: Path) -> tuple[RateMeasurement, ...]:
    """Return the rates of a file, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        RateMeasurement(
            id=new_id(),
            created_at=utc_now(),
            operation=row["operation"],
            dtype=row["dtype"],
            shape=tuple(int(extent) for extent in row["shape"].split("x") if extent),
            size=int(row["size"]) if row["size"] else None,
            ranks=int(row["ranks"]),
            value=float(row["value"]),
            unit=row["unit"],
            repeats=int(row["repeats"]),
            spread=float(row["spread"]),
            fingerprint=Fingerprint(
                machine=MachineIdentity(device=row["device"], cpu=row["cpu"], cores=int(row["cores"])),
                versions=Versions(torch=row["torch"]),
            ),
            source="shipped: dsplan bench",
        )
        for row in rows
    )


def write_rates(path: Path, rates: Iterable[RateMeasurement]) -> None:
    """Replace the file by these rates, of which the first counts where two measured the same."""
    rows = {(rate.operation, rate.dtype, rate.shape, rate.size, rate.ranks): rate for rate in reversed(tuple(rates))}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, *_PLACE))
    for key in sorted(rows, key=lambda key: (key[4], key[0], key[1], key[3] or 0, key[2])):
        rate = rows[key]
        machine, versions = rate.fingerprint.machine, rate.fingerprint.versions
        shape = "x".join(map(str, rate.shape))
        figures = (f"{rate.value:.5g}", rate.unit, rate.repeats, f"{rate.spread or 0:.3g}")
        columns = (machine.device, machine.cpu, machine.cores, versions.torch)
        writer.writerow((rate.operation, rate.dtype, shape, rate.size or "", rate.ranks, *figures, *columns))
    replace_text(path, text.getvalue())
