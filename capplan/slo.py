"""What users must see: limits on TTFT and TPOT, by name or as numbers."""

import re
from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas.latency import reading_tpot_s

_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in seconds; None: no limit."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None

    def to_dict(self) -> dict[str, str | float | None]:
        """JSON of the limits."""
        return {"name": self.name, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s}


# The serving lesson's limits: a chat that feels immediate, and text as fast as it is read.
NAMED: Final = {
    "chat": Slo(name="chat", ttft_s=0.5, tpot_s=0.05),
    "reading": Slo(name="reading", tpot_s=reading_tpot_s()),
}


def parse_time_s(text: str) -> float | None:
    """Seconds of "500ms" or "1.5s"; None where it is no time with a unit."""
    match = _TIME.fullmatch(text.strip().lower())
    return None if match is None else float(match.group(1)) * _UNITS[match.group(2)]


def parse_slo(text: str) -> Slo:
    """ "chat", "reading", or "ttft=500ms,tpot=50ms" (either); InputError otherwise."""
    name = text.strip().lower()
    if name in NAMED:
        return NAMED[name]
    if "=" not in name:
        raise InputError(
            f"unknown service level {shown(text)}",
            where="--slo",
            hint=did_you_mean(name, list(NAMED), "chat, reading, or ttft=500ms,tpot=50ms"),
        )
    limits: dict[str, float] = {}
    for part in name.split(","):
        key, _, value = part.strip().partition("=")
        seconds = parse_time_s(value)
        if key not in ("ttft", "tpot") or key in limits:
            raise InputError(f"{shown(part)} is no limit", where="--slo", hint="ttft=500ms,tpot=50ms")
        if seconds is None or seconds <= 0:
            raise InputError(
                f"{shown(value)} is no time with a unit", where=f"--slo {key}", hint="write 500ms or 0.5s"
            )
        limits[key] = seconds
    return Slo(name=name, ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"))
