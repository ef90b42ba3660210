"""A KV pool counted in tokens, as SGLang, TensorRT-LLM and TGI make it: what a token takes, how many fit.

    tokens = ⌊ pool / bytes per token ⌋, in whole pages

Sliding layers count like full ones where an engine keeps one pool for all; `sliding` is their part where it
keeps two. Recurrent states are held by sequence and are not in the rate.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.engines.kv_groups import stage_layers
from capplan.errors import InputError, shown
from capplan.kv import kv_layout
from capplan.specs import Model

Version = tuple[int, int, int]
UNKNOWN: Final = "unknown"
"""The version of a log that does not say: planned like the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRate:
    """What one rank holds: bytes per token in full and in sliding layers, and per sequence for states."""

    full: float
    sliding: float
    state: int
    window: int | None

    @property
    def total(self) -> float:
        """Bytes per token where sliding layers keep everything."""
        return self.full + self.sliding


def token_rate(
    model: Model, *, kv_bits: float, tp: int = 1, pp: int = 1, stage: range | None = None
) -> TokenRate:
    """The rate on the widest rank: heads divided by `tp`, layers by `pp` stages; or on that of `stage`.

    Raises InputError for more stages than layers.
    """
    if pp > model.layers:
        raise InputError(
            f"{model.layers} layers cannot be cut into {pp} stages", where="--pp", hint="fewer stages"
        )
    held = stage_layers(model.layers, pp) if stage is None else (stage,)
    stages = [_stage(model, kv_bits, tp, layers) for layers in held]
    return max(stages, key=lambda rate: (rate.total, rate.state))


def draft_rate(draft: Model | None, *, kv_bits: float, tp: int) -> float:
    """Bytes that a draft keeps of a token on one rank; 0 without one."""
    return 0.0 if draft is None else token_rate(draft, kv_bits=kv_bits, tp=tp).total


def _stage(model: Model, kv_bits: float, tp: int, layers: range) -> TokenRate:
    layout = kv_layout(model, kv_bits=kv_bits, tp=tp, layers=layers)
    full = sliding = 0.0
    window: int | None = None
    for entry in layout.groups:
        if entry.kind == "sliding" and entry.window is not None:
            sliding += entry.entry_bytes / entry.stride
            window = max(window or 0, entry.window)
        else:
            full += entry.entry_bytes / entry.stride
    return TokenRate(full=full, sliding=sliding, state=layout.state_bytes, window=window)


def tokens_in(pool: float, rate: float, page: int = 1) -> int:
    """Tokens of `rate` bytes that fit into `pool` bytes, in whole pages of `page` tokens; 0 for no pool.

    Example: 26.91 GiB at 131,072 B, pages of 64: 220,416.
    """
    if pool <= 0 or rate <= 0:
        return 0
    return int(pool // rate) // page * page


def version_numbers(version: str, engine: str, example: str) -> Version:
    """A version as numbers, such as 0.4.10.post2; InputError where it is none."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)", version.strip(), re.ASCII)
    if match is None:
        raise InputError(
            f"{shown(version)} is no {engine} version", where="--engine-version", hint=f"as in {example}"
        )
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


def known_version(version: str | None, newest: str) -> str:
    """The version to plan for: the newest one known where none is given or a log does not say."""
    return newest if version is None or version == UNKNOWN else version


def dated_default(profile: Mapping[str, Any], name: str, version: str, *, engine: str, example: str) -> int:
    """The default `name` of an engine's profile at `version`: the newest entry not younger than it.

    Errors: InputError for a version older than the profile's rules, or that is none.
    """
    asked = version_numbers(version, engine, example)
    entries = [e for e in profile[name] if version_numbers(e["since"], engine, example) <= asked]
    if not entries:
        raise InputError(
            f"{engine} {version} is older than the rules known here",
            where="--engine-version",
            hint=f"{profile['oldest']} or newer",
        )
    return int(entries[-1]["value"])
