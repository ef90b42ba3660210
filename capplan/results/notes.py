"""What the notes of a measured row say about how it was run: parts "name=value" between semicolons."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_WARN: Final = re.compile(r"\bWARN\b\s*([^;]*)")
_PAIR: Final = re.compile(r"(?:^|[;:]\s*|\s)([A-Za-z]\w*)=([^;\s]*)")
_FLAG: Final = re.compile(r"--([A-Za-z][\w-]*)(?:[= ](?!--)([^\s;]+))?")
_SPECULATIVE: Final = ("speculative-config", "speculative-algorithm", "speculative-model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotes:
    """Facts parsed from a row's notes; None or False where they say nothing.

    `warnings` are the collector's own doubts about the row. `flags` are the server's, by name without
    dashes, "" for a switch; underscores read as dashes. `p99_ttft_s` and the like are in `more`, by name.
    `origin`: whose runs they are. `varied`: lengths are means of different ones. `prefill_worker`,
    `decode_worker`: the two sides of a disaggregated deployment, by name.
    """

    text: str
    origin: str | None = None
    varied: bool = False
    statistic: str = "mean"
    warnings: tuple[str, ...] = ()
    attention_dp: bool | None = None
    attention_dp_ranks: int | None = None
    moe_tp: int | None = None
    moe_ep: int | None = None
    speculative: bool = False
    prefix_cache: bool = False
    enforce_eager: bool = False
    chunked_prefill: bool | None = None
    requests: int | None = None
    duration_s: float | None = None
    request_per_s: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, float] = field(default_factory=dict)
    prefill_worker: Mapping[str, int] = field(default_factory=dict)
    decode_worker: Mapping[str, int] = field(default_factory=dict)


def read_notes(text: str) -> RunNotes:
    """The facts in `text`; what is not understood stays in `text`."""
    pairs = dict(_PAIR.findall(text))
    flags_text = re.search(r"\bflags=([^;]*)", text)
    flags = {
        name.replace("_", "-"): value.strip("\"'")
        for name, value in _FLAG.findall(flags_text[1] if flags_text else "")
    }
    lowered = text.lower()
    section = re.search(r"\bsection=([^;]*)", text)
    title = section[1].lower() if section else ""
    dp = pairs.get("attn_dp")
    seqs = _first_count(flags, "max-num-seqs", "max-running-requests", "max-batch-size") or _count(
        pairs.get("max_num_seqs") or _after(r"max_num_seqs (\d+)", text)
    )
    return RunNotes(
        text=text,
        origin=_after(r"(?:^|; )origin=([^;]+)", text),
        varied="isl/osl are means" in lowered,
        statistic=_statistic(lowered),
        warnings=tuple(warning.strip() for warning in _WARN.findall(text)),
        attention_dp=_attention_dp(dp, flags, lowered),
        attention_dp_ranks=_first_count(flags, "dp-size", "dp", "data-parallel-size") or _count(dp),
        moe_tp=_count(pairs.get("moe_tp")),
        moe_ep=_count(pairs.get("moe_ep")) or _first_count(flags, "ep-size", "ep"),
        speculative="speculative decoding" in lowered
        or "mtp likely on" in lowered
        or any(name in flags for name in _SPECULATIVE),
        prefix_cache="benefits from prefix cache" in lowered or "prefix cache" in title,
        enforce_eager="enforce_eager" in lowered or "enforce-eager" in flags,
        chunked_prefill=True if "enable-chunked-prefill" in flags else None,
        requests=_count(pairs.get("requests") or pairs.get("num_prompts") or _after(r"(\d+) requests", text)),
        duration_s=_number(pairs.get("duration_s") or _after(r"duration ([\d.]+)s", text)),
        request_per_s=_number(pairs.get("req_s")),
        max_num_seqs=seqs,
        max_num_batched_tokens=_first_count(
            flags, "max-num-batched-tokens", "chunked-prefill-size", "max-num-tokens"
        )
        or _count(pairs.get("max_num_batched_tokens")),
        flags=flags,
        more=_milliseconds(pairs),
        prefill_worker=_worker("prefill", text),
        decode_worker=_worker("decode", text),
    )


def _statistic(text: str) -> str:
    """What the row's latencies are; tables print means where they do not say."""
    if "mean ttft" in text:
        return "mean"
    return "median" if re.search(r"median ttft|tpot median|50th percentile", text) else "mean"


def _attention_dp(dp: str | None, flags: Mapping[str, str], text: str) -> bool | None:
    ranks = _count(dp)
    if ranks is not None:
        return ranks > 1
    if "enable-dp-attention" in flags or "attention-dp" in text:
        return True
    return None


def _milliseconds(pairs: Mapping[str, str]) -> dict[str, float]:
    """ "median_ttft=12.5" (ms) → {"median_ttft_s": 0.0125}."""
    found: dict[str, float] = {}
    for name, text in pairs.items():
        value = _number(text) if re.fullmatch(r"(?:median|p\d+)_(?:ttft|tpot)", name) else None
        if value is not None:
            found[f"{name}_s"] = value / 1000
    return found


def _worker(side: str, text: str) -> dict[str, int]:
    """ "decode workers=2 tp=8 dp=1 ep=8" → its numbers."""
    found = re.search(rf"{side} workers=([^;]*)", text)
    if found is None:
        return {}
    numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", f"workers={found[1]}")}
    return numbers


def _after(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _first_count(flags: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = _count(flags.get(name))
        if value is not None:
            return value
    return None


def _count(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,9}", text) and int(text) > 0 else None


def _number(text: str | None) -> float | None:
    if not text or not re.fullmatch(r"\d{1,12}(?:\.\d+)?", text):
        return None
    return float(text) or None
