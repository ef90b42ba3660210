"""vLLM's defaults by version and memory class, from profiles/engines/vllm.yaml."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from capplan import catalog
from capplan.engines.plan import EngineFlags, Flag
from capplan.errors import InputError, shown
from capplan.specs import Gpu, Model
from capplan.units import GIB

UNKNOWN: Final = "unknown"
"""The version to ask for a band over all versions."""

Number = tuple[int, int, int]


@functools.cache
def facts() -> Mapping[str, Any]:
    """The facts file as it stands."""
    return catalog.read_yaml(catalog.PROFILES / "engines" / "vllm.yaml")


@functools.cache
def calibration() -> Mapping[str, Any]:
    """The fitted numbers (profiles/calibrations/memory-vllm.yaml)."""
    return catalog.read_yaml(catalog.PROFILES / "calibrations" / "memory-vllm.yaml")


def number(version: str) -> Number:
    """A version as numbers; InputError where it is none, or older than the rules."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?![\d])", version.strip(), re.ASCII)
    if match is None:
        raise InputError(
            f"{shown(version)} is no vLLM version", where="--engine-version", hint="as in 0.19.1"
        )
    major, minor, patch = (int(part or 0) for part in match.groups())
    if (major, minor, patch) < _number(facts()["oldest"]):
        raise InputError(
            f"vLLM {shown(version)} is older than the rules known here",
            where="--engine-version",
            hint=f"{facts()['oldest']} or newer",
        )
    return major, minor, patch


def _number(text: str) -> Number:
    parts = [int(part) for part in text.split(".")]
    return parts[0], parts[1], parts[2] if len(parts) > 2 else 0


def since(key: str, version: Number) -> bool:
    """Whether the version has what the fact `key` dates."""
    return version >= _number(facts()[key])


def beyond(version: Number) -> bool:
    """Whether the version is newer than any the rules were read from."""
    return version[:2] > _number(facts()["newest"])[:2]


def entry(key: str, version: Number) -> Mapping[str, Any]:
    """The entry of a dated list that holds for the version."""
    entries: Sequence[Mapping[str, Any]] = facts()[key]
    return [one for one in entries if _number(one["since"]) <= version][-1]


def resolve(
    model: Model, flags: EngineFlags, *, version: Number, visible_bytes: int, gpu: Gpu | None
) -> dict[str, Flag]:
    """Every flag the plan needs, as asked or as the version sets it.

    Errors: InputError for lengths the model does not have and flags that contradict each other.
    """
    made: dict[str, Flag] = {}

    def put(name: str, default: int | float, source: str) -> None:
        asked = getattr(flags, name)
        if asked is not None:
            made[name] = Flag(name=name, value=asked, source="asked")
        else:
            made[name] = Flag(name=name, value=default, source=source)

    put("gpu_memory_utilization", entry("gpu_memory_utilization", version)["value"], "default")
    length = _model_len(model, flags)
    put("max_model_len", length, "the model's own limit")
    size = _memory_class(version, visible_bytes, gpu)
    source = (
        f"default of the server, from {size['at_least_gib']} GiB on" if size["at_least_gib"] else "default"
    )
    put("max_num_seqs", size["max_num_seqs"], source)
    tokens = size["max_num_batched_tokens"]
    if not since("v1_since", version):
        chunked = length > facts()["v0_chunked_beyond_tokens"]
        least = facts()["v0_least_batched_tokens"]
        tokens = entry("v0_chunked_batched_tokens", version)["value"] if chunked else max(length, least)
        source = "default with chunked prefill" if chunked else "default: a whole prompt"
        if flags.max_num_batched_tokens is not None and flags.max_num_batched_tokens < length and not chunked:
            raise InputError(
                f"{flags.max_num_batched_tokens} batched tokens are fewer than a prompt of {length}",
                where="--max-num-batched-tokens",
                hint="this version takes whole prompts: raise it, or lower --max-model-len",
            )
    put("max_num_batched_tokens", tokens, source)
    _sequences_within_tokens(made, flags)
    put("block_size", 16, "default")
    made["enforce_eager"] = Flag(
        name="enforce_eager", value=flags.enforce_eager, source="asked" if flags.enforce_eager else "default"
    )
    return made


def _sequences_within_tokens(made: dict[str, Flag], flags: EngineFlags) -> None:
    tokens, sequences = made["max_num_batched_tokens"], made["max_num_seqs"]
    if tokens.value >= sequences.value:  # type: ignore[operator]
        return
    if flags.max_num_seqs is not None:
        raise InputError(
            f"{tokens.value} batched tokens are fewer than {sequences.value} sequences",
            where="--max-num-batched-tokens, --max-num-seqs",
            hint="every running sequence needs a token a step",
        )
    made["max_num_seqs"] = Flag(name="max_num_seqs", value=tokens.value, source="no more than batched tokens")


def _model_len(model: Model, flags: EngineFlags) -> int:
    own, asked = model.max_context, flags.max_model_len
    if asked is None and own is None:
        raise InputError(
            f"{model.name} states no longest context", where="--max-model-len", hint="give one, such as 8192"
        )
    if asked is not None and own is not None and asked > own:
        raise InputError(
            f"{asked:,} tokens are more than {model.name} can hold ({own:,})",
            where="--max-model-len",
            hint=f"at most {own}: vLLM refuses more",
        )
    return asked if asked is not None else own or 0


def _memory_class(version: Number, visible_bytes: int, gpu: Gpu | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    names = catalog.normalised(f"{gpu.id} {gpu.name}") if gpu is not None else ""
    for size in entry("server_defaults", version)["classes"]:
        excluded = "except" in size and size["except"] in names
        if visible_bytes >= size["at_least_gib"] * GIB and not excluded:
            found = size
    return found
