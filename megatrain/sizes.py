"""Sizes, times and rates: from what people type to int bytes, and back to what people read.

Scope: `parse_size` and `parse_count` for run files and options; `format_*` for reports. The only place where GiB and
GB/s exist.
Not here: which size a run needs (`tiering/plan.py`), the run file itself (`megatrain/config.py`).
"""

import math
import re
from decimal import Decimal

EXAMPLE = "write it like 256MiB, 0.5GiB, 10 GB or 1e8"

# A bare letter is decimal: a budget is an upper bound, and the smaller reading never takes more than was meant.
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}

_SIZE = re.compile(
    r"\s*(?P<number>[+-]?[0-9][0-9_]*(?:\.[0-9]*)?|[+-]?\.[0-9]+)(?P<exp>[eE][+-]?[0-9]{1,3})?"
    r"\s*(?P<unit>[A-Za-z]*)\s*"
)
_LARGEST = 2**63 - 1


def parse_size(value: object) -> int:
    """Bytes of `value`: a number of bytes, or text with a unit (KiB = 1024, KB = K = 1000; case does not matter).

    Fractions of a byte are dropped. Raises ValueError, with an example, for what is negative, not finite or no size.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size: {EXAMPLE}")
    match = _SIZE.fullmatch(value if isinstance(value, str) else format(Decimal(value), "f"))  # nan and inf: no match
    unit = _UNITS.get(match["unit"].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a size: {EXAMPLE}")
    number = Decimal(match["number"].replace("_", "") + (match["exp"] or ""))
    if number < 0:
        raise ValueError(f"{value!r} is negative; a size is not: {EXAMPLE}")
    nbytes = int(number * unit)
    if nbytes > _LARGEST:
        raise ValueError(f"{value!r} is more than any machine has ({_LARGEST} bytes): {EXAMPLE}")
    return nbytes


_COUNT = re.compile(
    r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*(?P<unit>[KMBT]?)\s*", re.IGNORECASE
)
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(text: str) -> int:
    """How many: `65536`, `1e9`, `300B`, `1.5T` (powers of 1000). Raises ValueError for what is no count above zero.

    >>> parse_count("15T"), parse_count("1e9")
    (15000000000000, 1000000000)
    """
    match = _COUNT.fullmatch(text)
    count = int(Decimal(match["number"].replace("_", "")) * _COUNTS[match["unit"].upper()]) if match else 0
    if count < 1:
        raise ValueError(f"{text!r} is no count: write it like 65536, 1e9, 300B or 15T")
    return count


def format_count(count: float) -> str:
    """`842`, `23.9M`, `70.6B`, `1.03T`, in powers of 1000."""
    for unit, power in (("T", 4), ("B", 3), ("M", 2), ("K", 1)):
        if abs(count) >= 1000**power and (power > 1 or abs(count) >= 10_000):
            return f"{count / 1000**power:.3g}{unit}"
    return f"{count:.3g}" if abs(count) < 100 else f"{count:.0f}"


def format_size(nbytes: float) -> str:
    """`1.50 GiB`; below one KiB the plain count, `512 B`. A difference may be negative."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(nbytes) >= 1024**power:
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`850 us`, `12.3 ms`, `4.20 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes} min {rest_s:02d} s"
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def format_rate(bytes_per_s: float) -> str:
    """`1.80 GB/s`, in powers of 1000 as drives and links are sold."""
    if not math.isfinite(bytes_per_s):
        return "unknown"
    for unit, power in (("TB/s", 4), ("GB/s", 3), ("MB/s", 2), ("kB/s", 1)):
        if abs(bytes_per_s) >= 1000**power:
            return f"{bytes_per_s / 1000**power:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"
