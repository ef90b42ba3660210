"""A calibration measured on one device (`origin: local`): read, checked, and the device that it stands for.

The file brings its device along, so that a CPU or a GPU that no catalog knows can be planned for. Nothing in
it is taken on trust: schema, hash, every number and every table are checked before a prediction reads them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan import local_checks as checks
from capplan.errors import InputError, shown
from capplan.local_checks import LOCAL as LOCAL
from capplan.specs import Gpu
from capplan.units import format_gib

SCHEMA: Final = "capplan.calibration/1"
KEYS: Final = (
    "schema", "id", "origin", "hardware", "software", "run", "state", "ceilings", "checks", "points", "fit",
    "error", "validity", "noise_floor_pct", "hash",
)  # fmt: skip
NEEDED: Final = ("schema", "id", "origin", "hardware", "fit", "error", "validity", "hash")
HARDWARE: Final = (
    "key", "kind", "name", "vendor", "architecture", "instructions", "memory_bytes", "bandwidth_bytes_per_s",
    "flop_per_s", "cache_bytes", "units",
)  # fmt: skip
CLOCKS_OF_HOST: Final = checks.CLOCKS["cpu"]
"""Clocks that the host's own work is inside of."""
SAME_SIZE: Final = 0.1
"""Drivers, ECC and the system's own share move a GPU's size by less than this part."""
MOST_BYTES: Final = 16 << 20
_HINT: Final = checks.HINT
PROFILES: Final = "a file that `capplan profile` wrote; `capplan list profiles` has yours"


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
        data = catalog.read_yaml(path)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from None
    return checked(data, str(path))


def of_device(profile: str, gpu: str | None) -> LocalCalibration:
    """The calibration in the file `profile`, which brings its device along.

    Raises InputError for no such file, one that is broken or was measured on no one device, and where `gpu`
    names another device.
    """
    if not Path(profile).is_file():
        raise InputError(f"no file {shown(profile)}", where="--profile", hint=PROFILES)
    local = read(Path(profile))
    refuse_other(local, gpu)
    return local


def refuse_other(local: LocalCalibration, gpu: str | None) -> None:
    """Raises InputError where `gpu` is not the device of the calibration, or no device."""
    if not gpu or catalog.normalised(gpu) == catalog.normalised(local.gpu.id):
        return
    asked = catalog.gpu(gpu).id
    if asked != local.gpu.id:
        raise InputError(
            f"the profile is of {local.gpu.id}, the question of {asked}",
            where="--profile, --gpu",
            hint="leave --gpu out: a profile brings its device",
        )


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
    for name in ("hardware", "software", "run", "state", "points", "fit", "error", "validity"):
        if not isinstance(data.get(name, {}), Mapping):
            raise refuse(f"{name} is no mapping")
    if data["hash"] != fit_hash(data["fit"]):
        raise refuse("its fit is not the one that was written: the hash differs", "ask for the file again")
    checks.numbers(data["fit"], "fit", where)
    for operation in ("gemm", "decode_attention", "elementwise"):
        if not data["fit"].get(operation):
            raise refuse(f"no fit.{operation}")
    for operation, by_dtype in data["fit"].items():
        checks.complete(operation, by_dtype, where)
        checks.tables(by_dtype, f"fit.{operation}", where)
    checks.errors(data["error"], where)
    checks.ranges(data["validity"], where)
    gpu = device(data["hardware"], where)
    checks.run(data.get("run", {}), data["hardware"]["kind"], where)
    checks.state(data.get("state", {}), where)
    for name in ("software", "ceilings", "checks", "noise_floor_pct"):
        checks.told(data.get(name), name, where)
    return LocalCalibration(
        id=checks.identity(data["id"], "id", where),
        gpu=gpu,
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
    checks.numbers({**numbers, "flop_per_s": rates}, "hardware", where, checks.MOST_RATE)
    if not all((*numbers.values(), *rates.values())):
        raise InputError("a rate or size of 0 in hardware", where=where, hint=_HINT)
    key = checks.identity(hardware["key"], "hardware.key", where)
    for name in ("name", "vendor", "architecture", "instructions"):
        checks.word(hardware[name], f"hardware.{name}", where)
    if (hardware["kind"] == "cpu") != key.startswith("cpu-"):
        raise InputError(f"hardware.key {key} of a {hardware['kind'].upper()}", where=where, hint=_HINT)
    if hardware["kind"] == "gpu" and key in catalog.ids("gpus"):
        return _of_catalog(key, str(hardware["name"]), numbers["memory_bytes"], where)
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


def _of_catalog(key: str, name: str, memory_bytes: float, where: str) -> Gpu:
    """The catalog's GPU. Raises InputError where the driver's name or the size is another GPU's."""
    gpu = catalog.load_gpu(key)
    found = catalog.index("gpus").get(catalog.normalised(name))
    if found != key or abs(memory_bytes / gpu.usable_bytes - 1) > SAME_SIZE:
        raise InputError(
            f"measured on {name} of {format_gib(int(memory_bytes))}, which is no {key}",
            where=where,
            hint=_HINT,
        )
    return gpu
