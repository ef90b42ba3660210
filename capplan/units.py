"""Unit constants and the formatting of quantities.

Inside the program every quantity is SI: bytes, seconds, FLOP, USD. The catalog loader turns vendor units
into SI and this module turns SI into text; nothing else converts.
"""

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 10**9
TERA = 10**12
GIGA = 10**9
HOUR_S = 3600
MONTH_HOURS = 730

_SIZE_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": GB,
    "tb": TERA,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": GIGA, "t": TERA}
# Plain decimal only: "1e3" stays an error, since YAML and shells disagree on what it is.
_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)"


def parse_size_bytes(text: str) -> int | None:
    """Bytes of "24GB", "24 GiB", "512MiB"; None when the text is no size or has no unit.

    A bare number has no unit: 24 could be GB or GiB, 7 % apart, so it is refused.
    """
    match = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
    if match is None or not match.group(2):
        return None
    factor = _SIZE_FACTORS.get(match.group(2).lower())
    return None if factor is None else round(float(match.group(1)) * factor)


def parse_count(text: str) -> int | None:
    """Count of "70b", "8.03B", "500m", "1.1t" or a plain integer; None when it is none of these."""
    match = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
    if match is None:
        return None
    factor = _COUNT_FACTORS.get(match.group(2).lower())
    return None if factor is None else round(float(match.group(1)) * factor)


def format_bytes(size_bytes: float, digits: int = 2) -> str:
    """Memory as text in the largest binary unit below it, down to bytes: "64.00 GiB"."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # 1000 GiB reads better than 0.98 TiB: step up only past ten units.
        if size >= unit * (10 if name == "TiB" else 1):
            return f"{sign}{size / unit:,.{digits}f} {name}"
    return f"{sign}{size:,.0f} B"


def format_gib(size_bytes: float, digits: int = 2) -> str:
    """Memory always in GiB, for columns that are compared: "0.13 GiB"."""
    value = size_bytes / GIB
    # A tiny negative would round to "-0.00".
    return f"{0.0 if round(value, digits) == 0 else value:,.{digits}f} GiB"


def format_seconds(time_s: float) -> str:
    """A time with three significant digits: "48.2 ms", "1.05 s", "12 µs", "2 h 5 min"."""
    if time_s == 0:
        return "0 s"
    for least, factor, name in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")):
        if abs(time_s) >= least * 0.9995:
            value = time_s * factor
            if name == "s" and value >= 600:
                minutes = round(value / 60)
                return f"{minutes // 60:,} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
            digits = max(0, 2 - math.floor(math.log10(abs(value))))
            return f"{value:,.{min(digits, 3)}f} {name}"
    raise AssertionError(time_s)


def format_usd(usd: float) -> str:
    """Money: cents from a dollar up, three significant digits below: "1,460.00", "0.508", "0.000008"."""
    if usd == 0 or abs(usd) >= 1:
        return f"{usd:,.2f}"
    digits = 2 - math.floor(math.log10(abs(usd)))
    text = f"{usd:.{digits}f}"
    return text if digits <= 3 else text.rstrip("0")


def format_unit_price(usd: float) -> str:
    """A price that is multiplied, to a hundredth of a cent: "2.2884", "2.00", "0.085"."""
    if usd and abs(usd) < 0.1:
        return format_usd(usd)
    text = f"{usd:,.4f}".rstrip("0")
    whole, _, cents = text.partition(".")
    return f"{whole}.{cents:0<2}"


def format_count(count: float) -> str:
    """A parameter count as people say it: "8.03 B", "671 B", "494 M"."""
    for factor, name in ((TERA, "T"), (GIGA, "B"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            value = count / factor
            # Three significant digits, never an exponent.
            digits = max(0, 2 - int(math.log10(value)))
            return f"{value:.{digits}f} {name}"
    return f"{count:.0f}"
