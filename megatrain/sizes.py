"""Sizes, times and rates: from what people type to int bytes, and back to what people read.

Scope: `parse_size` for run files and options; `format_*` for reports. The only place where GiB and GB/s exist.
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
