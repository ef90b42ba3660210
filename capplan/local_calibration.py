"""A calibration measured on one device (`origin: local`): read, checked, and the device that it stands for.

The file brings its device along, so that a CPU or a GPU that no catalog knows can be planned for. Nothing in
it is taken on trust: schema, hash, every number and every table are checked before a prediction reads them.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan.errors import InputError, shown
from capplan.specs import Gpu

SCHEMA: Final = "capplan.calibration/1"
LOCAL: Final = "local"
KEYS: Final = (
    "schema", "id", "origin", "hardware", "software", "run", "state", "ceilings", "checks", "points", "fit",
    "error", "validity", "noise_floor_pct", "hash",
)  # fmt: skip
NEEDED: Final = ("schema", "id", "origin", "hardware", "fit", "error", "validity", "hash")
HARDWARE: Final = (
    "key", "kind", "name", "vendor", "architecture", "instructions", "memory_bytes", "bandwidth_bytes_per_s",
    "flop_per_s", "cache_bytes", "units",
)  # fmt: skip
CLOCKS_OF_HOST: Final = ("wall", "thread-cpu")
"""Clocks that the host's own work is inside of."""
MOST_BYTES: Final = 16 << 20
_HINT: Final = "profile again, or give another file"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalCalibration:
    """One file: `data` is all of it, `fit` what predictions read, `gpu` the device it was measured on."""

    id: str
    gpu: Gpu
    kind: str
    fit: Mapping[str, Any]
    error: Mapping[str, Any]
    validity: Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def host_inside(self) -> bool:
        """Whether the timed steps hold the host's work: nothing of an engine's is added then."""
        return self.data.get("run", {}).get("clock") in CLOCKS_OF_HOST

    @property
    def hardware_key(self) -> str:
        """What files must share to be merged."""
        return str(self.data["hardware"]["key"])


def fit_hash(fit: Mapping[str, Any]) -> str:
    """SHA-256 of what predictions read, as canonical JSON."""
    return hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> LocalCalibration:
    """A file, checked. Raises InputError, naming what is wrong."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError("too large for a calibration", where=str(path), hint=_HINT)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from None
    return checked(catalog.read_yaml(path), str(path))


def checked(data: Mapping[str, Any], where: str) -> LocalCalibration:
    """A file's content, checked."""

    def refuse(message: str, hint: str = _HINT) -> InputError:
        return InputError(message, where=where, hint=hint)

    if data.get("schema") != SCHEMA:
        raise refuse(f"schema {shown(data.get('schema'))} is not {SCHEMA}", "give a calibration file")
    if data.get("origin") != LOCAL:
        raise refuse(f"origin {shown(data.get('origin'))}, not {LOCAL}", "shipped ones go by their name")
    missing = [name for name in NEEDED if name not in data]
    if missing:
        raise refuse(f"no {', '.join(missing)}", "the file is not complete")
    unknown = sorted(set(data) - set(KEYS))
    if unknown:
        raise refuse(f"unknown key {shown(unknown[0])}", f"one of {', '.join(KEYS)}")
    for name in ("hardware", "fit", "error", "validity", "run", "points"):
        if not isinstance(data.get(name, {}), Mapping):
            raise refuse(f"{name} is no mapping")
    if data["hash"] != fit_hash(data["fit"]):
        raise refuse("its fit is not the one that was written: the hash differs", "ask for the file again")
    _numbers(data["fit"], "fit", where)
    for operation, by_dtype in data["fit"].items():
        _complete(operation, by_dtype, where)
        _tables(by_dtype, f"fit.{operation}", where)
    _errors(data["error"], where)
    return LocalCalibration(
        id=str(data["id"]),
        gpu=device(data["hardware"], where),
        kind=str(data["hardware"].get("kind")),
        fit=data["fit"],
        error=data["error"],
        validity=data["validity"],
        data=data,
    )


def device(hardware: Mapping[str, Any], where: str) -> Gpu:
    """The device of a `hardware` block: the catalog's facts where its key is there, else the block's."""
    missing = [name for name in HARDWARE if name not in hardware]
    unknown = sorted(set(hardware) - set(HARDWARE))
    if missing or unknown:
        wrong = f"no hardware.{missing[0]}" if missing else f"unknown key hardware.{unknown[0]}"
        raise InputError(wrong, where=where, hint=_HINT)
    if hardware["kind"] not in ("cpu", "gpu"):
        raise InputError(f"hardware.kind {shown(hardware['kind'])}", where=where, hint="cpu or gpu")
    numbers = {
        name: hardware[name] for name in ("memory_bytes", "bandwidth_bytes_per_s", "cache_bytes", "units")
    }
    rates = hardware["flop_per_s"]
    if not isinstance(rates, Mapping) or not rates:
        raise InputError("no hardware.flop_per_s", where=where, hint=_HINT)
    _numbers({**numbers, "flop_per_s": rates}, "hardware", where)
    if not all((*numbers.values(), *rates.values())):
        raise InputError("a rate or size of 0 in hardware", where=where, hint=_HINT)
    key = str(hardware["key"])
    if hardware["kind"] == "gpu" and key in catalog.ids("gpus"):
        return catalog.load_gpu(key)
    return Gpu(
        id=key,
        name=str(hardware["name"]),
        vendor=str(hardware["vendor"]),
        architecture=str(hardware["architecture"]),
        memory_bytes=int(numbers["memory_bytes"]),
        memory_driver_bytes=int(numbers["memory_bytes"]),
        memory_bandwidth_bytes_per_s=float(numbers["bandwidth_bytes_per_s"]),
        flop_per_s={str(name): float(rate) for name, rate in rates.items()},
        l2_bytes=int(numbers["cache_bytes"]),
        sm_count=int(numbers["units"]),
        source=where,
        read_on="",
    )


def _numbers(found: Any, name: str, where: str) -> None:
    """Refuse anything in a tree of mappings and lists that is no finite number from 0."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            _numbers(value, f"{name}.{key}", where)
    elif isinstance(found, list):
        for value in found:
            _numbers(value, name, where)
    elif isinstance(found, bool) or not isinstance(found, int | float):
        raise InputError(f"{name} is {shown(found)}", where=where, hint=_HINT)
    elif not (math.isfinite(found) and found >= 0):
        raise InputError(f"{name} is {found}", where=where, hint=_HINT)


_SMALL_FORM: Final = ("t0_us", "memory", "p", "cache_reach", "cache_speed")
_DECODE_FORM: Final = (*_SMALL_FORM, "chain_us", "serial_ns", "tile_us", "compute")
_LINK: Final = ("t0_us", "memory", "p", "link_bytes_per_s")
# Operation → the parts of one dtype's numbers, and what each must hold.
_PARTS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "gemm": {"shapes": (), "affine": ("m", "fixed_us", "weight_ns")},
    "decode_attention": {
        "shape": ("heads", "kv_heads", "k_width", "v_width"),
        "table": ("batch", "fixed_us", "token_ns"),
        "general": _DECODE_FORM,
    },
    "prefill_attention": {"": ("width", "fixed_us", "token_ns", "pair_ns")},
    "elementwise": {"named": (), "general": _SMALL_FORM},
    "anchors": {"": ("gemm", "attention", "layer_us", "step_us")},
    "all_reduce": {"": _LINK},
    "all_gather": {"": _LINK},
}
_POSITIVE: Final = ("memory", "compute", "p", "width", "link_bytes_per_s", "cache_speed", "heads", "kv_heads")
"""Numbers that a time is divided by."""


def _complete(operation: str, found: Any, where: str) -> None:
    """Refuse an operation without the numbers that its prediction reads."""
    if operation not in _PARTS or not isinstance(found, Mapping):
        raise InputError(f"fit.{operation} is not known", where=where, hint=_HINT)
    entries: list[tuple[str, Any]] = []
    for key, value in found.items():
        by_local = value if operation == "anchors" or key == LOCAL else _under(value, LOCAL)
        one_by_rank = key == LOCAL and isinstance(by_local, Mapping)
        entries += list(by_local.items()) if one_by_rank else [(str(key), by_local)]
    for key, entry in entries:
        for part, names in _PARTS[operation].items():
            place = f"fit.{operation}.{key}" + (f".{part}" if part else "")
            held = _under(entry, part) if part else entry
            if not isinstance(held, Mapping):
                raise InputError(f"no {place}", where=where, hint=_HINT)
            for name in names:
                if name not in held or (name in _POSITIVE and not held[name]):
                    raise InputError(f"no {place}.{name}", where=where, hint=_HINT)
            if not names:
                axis = "m" if operation == "gemm" else "bytes"
                for row, table in held.items():
                    if not isinstance(_under(table, axis), list) or not isinstance(_under(table, "us"), list):
                        raise InputError(f"no table {place}.{row}", where=where, hint=_HINT)


def _under(found: Any, name: str) -> Any:
    """What a mapping has under a name; None where there is none, or no mapping."""
    return found.get(name) if isinstance(found, Mapping) else None


def _errors(found: Mapping[str, Any], where: str) -> None:
    """Refuse errors without the quantiles that a band is made of."""
    for kind in ("step", "prompt"):
        for dtype, error in (found.get(kind) or {}).items():
            for name in ("p10", "p50", "p90", "rows", "median_pct"):
                value = _under(error, name)
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                    raise InputError(
                        f"error.{kind}.{dtype}.{name} is {shown(value)}", where=where, hint=_HINT
                    )
            if not (error["p10"] and error["p90"] and error["rows"]):
                raise InputError(f"error.{kind}.{dtype} has a 0", where=where, hint=_HINT)


# The axis of a table, by the name that its lists stand under.
_AXES: Final = ("m", "bytes", "batch")


def _tables(found: Any, name: str, where: str) -> None:
    """Refuse tables whose axis does not rise, whose lists differ in length, or that fall."""
    if not isinstance(found, Mapping):
        return
    axis = next((one for one in _AXES if isinstance(found.get(one), list)), None)
    if axis is None:
        for key, value in found.items():
            _tables(value, f"{name}.{key}", where)
        return
    steps: Sequence[float] = found[axis]
    if not steps or any(b <= a for a, b in pairwise(steps)):
        raise InputError(f"{name}.{axis} does not rise", where=where, hint=_HINT)
    for key, values in found.items():
        if not isinstance(values, list) or len(values) != len(steps):
            raise InputError(f"{name}.{key} has not as many values as {axis}", where=where, hint=_HINT)
        if any(b < a for a, b in pairwise(values)):
            raise InputError(f"{name}.{key} falls", where=where, hint=_HINT)
