"""Units are converted here, once, at the edge; inside dsplan everything is bytes, seconds and FLOP/s.

GiB is 2**30 bytes (what `nvidia-smi` and torch print); GB is 1e9 bytes (what links and `--max-memory-gb` use).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 1_000_000_000

DAY_SECONDS = 24 * 3600.0
# A unit, its length in seconds, and from how many of it people use it: 75.8 s, not 1.26 min.
_TIME_UNITS = (
    ("day", DAY_SECONDS, 1),
    ("h", 3600.0, 1),
    ("min", 60.0, 2),
    ("s", 1.0, 1),
    ("ms", 1e-3, 1),
    ("us", 1e-6, 0),
)
_LENGTH_SUFFIXES = {"": 1, "k": KIB, "m": 10**6}
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
    """Return a parameter or token count as people read it: `6.66B`, `124M`."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if float(f"{count / scale:.3g}") >= 1:
            return f"{three_digits(count / scale)}{suffix}"
    return f"{count:.0f}"


def three_digits(value: float) -> str:
    """Return a number with three digits and never an exponent: `0.412`, `22.8`, `1373`."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def format_ratio(ratio: float) -> str:
    """Return a ratio with two decimals, or with two digits where it is below 0.1: `21.56`, `0.32`, `0.0034`."""
    if ratio >= 0.0995 or ratio <= 0:
        return f"{ratio:.2f}"
    return f"{ratio:.{1 - math.floor(math.log10(ratio))}f}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which people say such a time, and its length in seconds."""
    if not seconds:
        return "s", 1.0
    # Rounded as it is printed, so that 0.9999 s is 1 s and not 1000 ms.
    return next((unit, length) for unit, length, least in _TIME_UNITS if float(f"{abs(seconds) / length:.3g}") >= least)


def common_unit(times: Iterable[float]) -> tuple[str, float] | None:
    """Return the unit in which a column has all of these times, and its length: none of 1,000, none below 0.1.

    The smallest of their own that is one; None where they differ too much, and each has its own.
    """
    every = list(times)
    units = sorted({time_unit(seconds) for seconds in every}, key=lambda unit: unit[1])
    return next(
        ((unit, length) for unit, length in units if max(every) < 999.5 * length and min(every) >= 0.1 * length), None
    )


def format_seconds(seconds: float, unit: tuple[str, float] | None = None) -> str:
    """Return a duration with three digits, in the unit people say it in, or the one that is given with its length.

    `150 ms`, `45 s`, `22.8 min`, `3.2 h`, `20 days`.
    """
    name, length = unit or time_unit(seconds)
    text = three_digits(seconds / length)
    return f"{text} {name}s" if name == "day" and text != "1" else f"{text} {name}"


def parse_count(text: str) -> int:
    """Return a count such as `6.7B`, `350M` or `124439808` as an integer.

    Raises:
        DsplanError: the text is not a positive count.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMbBtT]?)\s*", text)
    amount = float(match[1]) * _COUNT_SUFFIXES[match[2].lower()] if match else 0.0
    count = round(amount) if math.isfinite(amount) else 0
    if count <= 0:
        raise DsplanError(f"{quote(text)} is not a size; write a count such as 350M, 6.7B or 1.3T")
    return count


def parse_length(text: str) -> int:
    """Return a length or a batch such as `8k`, `4M` or `2048`.

    `k` is 1024, as such numbers are powers of two (a sequence of 8k is 8192 tokens), and `M` is 1e6.

    Raises:
        DsplanError: the text is not a positive whole number with one of these suffixes.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kKmM]?)", text)
    amount = float(match[1]) * _LENGTH_SUFFIXES[match[2].lower()] if match else 0.0
    if not 0 < amount < math.inf or amount != round(amount):
        raise DsplanError(f"{quote(text)} is not a whole number; write 2048, 8k (8192) or 4M (4,000,000)")
    return round(amount)
