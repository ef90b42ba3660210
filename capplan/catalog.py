"""profiles/ → specs: strict keys, SI conversion, names by declared alias, did-you-mean.

One YAML a thing. A name is looked up in profiles/index.json (written by `python -m capplan.catalog`), so a
command opens only the files it needs.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from capplan.errors import InputError, did_you_mean, shown
from capplan.readers import hf_config
from capplan.readers.config_keys import Keys
from capplan.readers.ggml_types import GGML_FORMATS
from capplan.specs import Architecture, Format, Gpu, MixRule, Model
from capplan.units import GB, GIGA, MIB, TERA

PROFILES: Final = Path(__file__).parent / "profiles"
_SEPARATORS: Final = str.maketrans("-_./", "    ")
KINDS: Final = ("gpus", "models", "formats", "architectures")
_FLOP_KEYS: Final = {
    "fp32_tflops": "fp32",
    "tf32_tflops": "tf32",
    "fp16_tflops": "fp16",
    "bf16_tflops": "bf16",
    "fp8_tflops": "fp8",
    "fp4_tflops": "fp4",
    "int8_tops": "int8",
    "int4_tops": "int4",
    "fp16_fp16acc_tflops": "fp16_fp16acc",
    "fp8_fp16acc_tflops": "fp8_fp16acc",
}


def normalised(name: str) -> str:
    """A name as names are compared: lower case, the separators - _ . / and space alike.

    Between two digits a separator counts (1.3b is not 13b); elsewhere it does not (RTX 4090 is RTX4090).
    """
    words = name.lower().translate(_SEPARATORS).split()
    made = words[0] if words else ""
    for word in words[1:]:
        made += f".{word}" if made[-1].isdigit() and word[0].isdigit() else word
    return made


def read_yaml(path: Path) -> Mapping[str, Any]:
    """One YAML mapping; InputError for a broken or absent one."""
    import yaml

    try:
        data = yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader)  # a safe loader
    except yaml.YAMLError as error:
        raise InputError(
            f"broken YAML: {str(error).splitlines()[0]}", where=str(path), hint="mend the file"
        ) from None
    if not isinstance(data, dict):
        raise InputError("not a YAML mapping", where=str(path), hint="write key: value pairs")
    return data


_indexes: dict[str, dict[str, str]] = {}


def index(kind: str) -> Mapping[str, str]:
    """Normalised alias → id (models: id, or id#N for its checkpoint N)."""
    if not _indexes:
        _indexes.update(json.loads((PROFILES / "index.json").read_bytes()))
    return _indexes[kind]


def ids(kind: str) -> list[str]:
    """All ids of a kind, sorted."""
    return sorted(path.stem for path in (PROFILES / kind).glob("*.yaml"))


def resolve(kind: str, name: str, noun: str) -> str:
    """The id that `name` declares itself to be; InputError with the nearest names otherwise."""
    found = index(kind).get(normalised(name)) if name.strip() else None
    if found is not None:
        return found
    raise InputError(
        f"unknown {noun} {shown(name)}",
        where=f"--{noun}" if noun != "format" else "--precision",
        hint=did_you_mean(name, known_names(kind), f"`capplan list {kind}` shows what is known"),
    )


def known_names(kind: str) -> list[str]:
    """Ids, names and aliases of a kind, for did-you-mean."""
    names = ids(kind)
    for path in (PROFILES / kind).glob("*.yaml"):
        data = read_yaml(path)
        names += [str(alias) for alias in data.get("aliases", [])]
        if kind == "models":
            names.append(str(data.get("name")))
    return names


def gpu(name: str) -> Gpu:
    """An accelerator by id or alias."""
    return load_gpu(resolve("gpus", name, "gpu"))


@cache
def load_gpu(identity: str) -> Gpu:
    """The accelerator with this id, vendor units turned into SI."""
    path = PROFILES / "gpus" / f"{identity}.yaml"
    keys = Keys(read_yaml(path), where=str(path))
    memory_mib = keys.optional_integer("memory_driver_mib")
    flop = {name: (keys.number(key) or 0) * TERA for key, name in _FLOP_KEYS.items() if key in keys.data}

    def scaled(key: str, factor: float) -> float | None:
        value = keys.number(key)
        return None if value is None else value * factor

    memory_gb = keys.number("memory_gb")
    bandwidth = keys.number("memory_bandwidth_gb_per_s")
    if memory_gb is None or bandwidth is None:
        raise InputError("memory or bandwidth missing", where=str(path), hint="add the figures")
    l2 = scaled("l2_mb", MIB)
    made = Gpu(
        id=keys.text("id") or "",
        name=keys.text("name") or "",
        vendor=keys.text("vendor") or "",
        architecture=keys.text("architecture") or "",
        compute_capability=keys.text("compute_capability"),
        memory_type=keys.text("memory_type"),
        memory_bytes=round(memory_gb * GB),
        memory_driver_bytes=None if memory_mib is None else memory_mib * MIB,
        memory_reading=keys.text("memory_reading"),
        memory_bandwidth_bytes_per_s=bandwidth * GB,
        flop_per_s=flop,
        l2_bytes=None if l2 is None else round(l2),
        sm_count=keys.optional_integer("sm_count"),
        boost_clock_hz=scaled("boost_clock_mhz", 1e6),
        tdp_w=keys.number("tdp_w"),
        nvlink_bytes_per_s=scaled("nvlink_gb_per_s", GIGA),
        pcie_gen=keys.optional_integer("pcie_gen"),
        pcie_lanes=keys.optional_integer("pcie_lanes"),
        max_gpus_per_node=keys.optional_integer("max_gpus_per_node"),
        scaleup_domain=keys.optional_integer("scaleup_domain"),
        aliases=tuple(keys.texts("aliases") or ()),
        ambiguous_aliases=_text_mapping(keys, "ambiguous_aliases"),
        unverified=tuple(keys.texts("unverified") or ()),
        conflicts=tuple(_conflict(keys, entry) for entry in keys.items("conflicts") or ()),
        notes=keys.text("notes") or "",
        source=keys.text("source") or "",
        read_on=str(keys.data.get("read_on", "")),
    )
    keys.used.update(("read_on", "memory_reading_sources"))
    _refuse_unknown(keys)
    return made


def _text_mapping(keys: Keys, name: str) -> dict[str, str]:
    child = keys.child(name)
    return {} if child is None else {str(key): str(value) for key, value in child.data.items()}


def _conflict(keys: Keys, entry: object) -> str:
    """One figure on which the sources disagree: the value kept, and what the others say."""
    if not isinstance(entry, dict):
        raise keys.fail("conflicts", f"{shown(entry)} is no mapping", "field, kept, others")
    inner = Keys(entry, where=keys.where, path="conflicts.")
    others = inner.child("others")
    said = [] if others is None else [f"{value} ({source})" for source, value in others.data.items()]
    return f"{inner.text('field')}: kept {entry.get('kept')}, others say {', '.join(said)}"


def _refuse_unknown(keys: Keys) -> None:
    for key in keys.unused():
        raise InputError(
            f"unknown key {shown(key)}",
            where=keys.where,
            hint=did_you_mean(key, keys.used, "see DESIGN for the file's keys"),
        )


def weight_format(name: str) -> Format:
    """A weight or KV format by id or alias."""
    return load_format(resolve("formats", name, "format"))


@cache
def load_format(identity: str) -> Format:
    """The format with this id."""
    path = PROFILES / "formats" / f"{identity}.yaml"
    keys = Keys(read_yaml(path), where=str(path))
    group = keys.child("group")
    element_bits = keys.number("element_bits") or 0
    values: dict[str, Any] = {}
    if group is not None:
        values = {
            "group_shape": group.text("shape"),
            "group": group.integer("size", default=1),
            "block_rows": group.integer("rows", default=1),
            "block_cols": group.integer("cols", default=1),
            "block_bytes": group.integer("block_bytes", default=0, low=0),
            "scale_bits": group.number("scale_bits", default=0),
            "zero_bits": group.number("zero_bits", default=0),
        }
        _refuse_unknown(group)
    made = Format(
        id=keys.text("id") or "",
        name=keys.text("name") or "",
        element_bits=element_bits,
        effective_bits=keys.number("effective_bits") or element_bits,
        extra_bytes_per_tensor=keys.integer("extra_bytes_per_tensor", default=0, low=0),
        activation_bits=keys.integer("activation_bits", default=16),
        arithmetic=_arithmetic(keys),
        quantizes="linear" if keys.text("quantizes") == "linear" else "all",
        keeps=tuple(keys.texts("keeps") or ()),
        kept_bits=keys.integer("kept_bits", default=16),
        rules=tuple(_mix_rule(keys, entry) for entry in keys.items("tensors") or ()),
        kv=keys.flag("kv"),
        aliases=tuple(keys.texts("aliases") or ()),
        notes=keys.text("notes") or "",
        source=keys.text("source") or "",
        read_on=str(keys.data.get("read_on", "")),
        **values,
    )
    keys.used.add("read_on")
    _refuse_unknown(keys)
    return made


def _arithmetic(keys: Keys) -> Literal["16-bit", "fp8", "int8", "fp4"]:
    """What the format's kernels multiply in."""
    text = keys.text("arithmetic", default="16-bit")
    for known in ("16-bit", "fp8", "int8", "fp4"):
        if text == known:
            return known
    raise keys.fail("arithmetic", f"{shown(text)} is not understood", "16-bit, fp8, int8 or fp4")


def _mix_rule(keys: Keys, entry: object) -> MixRule:
    """One line of a GGUF mix: a kind of tensor, the GGML type it has, and where that holds."""
    if not isinstance(entry, dict):
        raise keys.fail("tensors", f"{shown(entry)} is no mapping", "tensor, type")
    inner = Keys(entry, where=keys.where, path="tensors.")
    name = inner.text("type") or ""
    if name not in GGML_FORMATS:
        raise inner.fail("type", f"unknown {shown(name)}", "a GGML type such as Q6_K")
    made = MixRule(
        tensor=inner.text("tensor") or "",
        stored=GGML_FORMATS[name],
        layers=inner.text("layers") or "all",
        min_gqa=inner.integer("min_gqa", default=0, low=0),
        min_experts=inner.integer("min_experts", default=0, low=0),
        experts=inner.optional_integer("experts"),
        layer_count=inner.optional_integer("layer_count"),
    )
    _refuse_unknown(inner)
    return made


def architecture(model_type: str) -> Architecture | None:
    """What a model_type's class adds to its config; None where it is not known."""
    identity = index("architectures").get(normalised(model_type))
    return None if identity is None else load_architecture(identity)


@cache
def load_architecture(identity: str) -> Architecture:
    """The architecture with this id."""
    path = PROFILES / "architectures" / f"{identity}.yaml"
    data = dict(read_yaml(path))
    known = {field.name for field in fields(Architecture)}
    for key in data:
        if key not in known:
            raise InputError(
                f"unknown key {shown(key)}",
                where=str(path),
                hint=did_you_mean(key, known, "see Architecture in specs.py"),
            )
    data["read_on"] = str(data.get("read_on", ""))
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    return Architecture(**values)


@cache
def load_model(identity: str) -> Model:
    """The catalog model with this id, or its checkpoint N for "id#N"."""
    stem, _, number = identity.partition("#")
    path = PROFILES / "models" / f"{stem}.yaml"
    data = read_yaml(path)
    config = dict(data["config"])
    name = str(data["name"])
    if number:
        checkpoint = data["checkpoints"][int(number)]
        name = str(checkpoint["name"])
        if "quantization_config" in checkpoint:
            config["quantization_config"] = checkpoint["quantization_config"]
        config.update(checkpoint.get("config", {}))
    model_type = hf_config.model_type_of(config)
    return hf_config.read_model(
        config,
        where=str(path),
        name=name,
        architecture=architecture(model_type) if model_type else None,
        source=str(data.get("source", "")),
        read_on=str(data.get("read_on", "")),
    )


def build_index() -> dict[str, dict[str, str]]:
    """The alias index of all profiles. Raises InputError where two things claim one alias."""
    made: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        entries: dict[str, str] = {}
        for identity in ids(kind):
            path = PROFILES / kind / f"{identity}.yaml"
            data = read_yaml(path)
            names = [identity, str(data.get("name", identity)), *data.get("aliases", ())]
            claims = [(name, identity) for name in names]
            for number, checkpoint in enumerate(data.get("checkpoints", ())):
                for name in (checkpoint["name"], *checkpoint.get("aliases", ())):
                    claims.append((name, f"{identity}#{number}"))
            for name, target in claims:
                key = normalised(str(name))
                if entries.setdefault(key, target) != target:
                    raise InputError(
                        f"alias {shown(name)} of {target} is also {entries[key]}'s",
                        where=str(path),
                        hint="an alias belongs to one thing",
                    )
        made[kind] = dict(sorted(entries.items()))
    return made


if __name__ == "__main__":
    (PROFILES / "index.json").write_text(json.dumps(build_index(), indent=0) + "\n")
