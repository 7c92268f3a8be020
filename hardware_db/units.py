"""Units are converted here, once, at the edge; inside dsplan everything is bytes, seconds and FLOP/s.

GiB is 2**30 bytes (what `nvidia-smi` and torch print); GB is 1e9 bytes (what links and `--max-memory-gb` use).
"""

from __future__ import annotations

import math
import re

from hardware_db.errors import DsplanError
from hardware_db.handed_in import shown

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 1_000_000_000

_COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def gib(count_bytes: float) -> float:
    """Bytes as GiB."""
    return count_bytes / GIB


def format_bytes(count_bytes: float) -> str:
    """Bytes as people read them: `3.2 GiB`, `512.0 MiB`."""
    sign = "-" if count_bytes < 0 else ""
    size = abs(count_bytes)
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_count(count: float) -> str:
    """A parameter or token count as people read it: `6.66B`, `124M`."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g}{suffix}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Seconds with a unit that keeps three digits: `412 ms`, `3.18 s`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def format_days(days: float) -> str:
    """A long time with three digits, in the unit people say it in: `20 days`, `1.5 hours`, `12 minutes`."""
    number, unit = days, "day"
    if number < 1:
        number, unit = days * 24, "hour"
    if number < 1:
        number, unit = days * 24 * 60, "minute"
    text = f"{number:.3g}"
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


def parse_count(text: str) -> int:
    """A count such as `6.7B`, `350M` or `124439808` as an integer.

    Raises:
        DsplanError: the text is not a positive count.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMbBtT]?)\s*", text)
    amount = float(match[1]) * _COUNT_SUFFIXES[match[2].lower()] if match else 0.0
    count = round(amount) if math.isfinite(amount) else 0
    if count <= 0:
        raise DsplanError(f"{shown(text)} is not a size; write a count such as 350M, 6.7B or 1.3T")
    return count
