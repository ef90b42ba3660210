"""vLLM's start-up as a plan: budget, what it profiles away, the KV pool, and whether it starts.

    KV pool = fraction · visible total − weights − profiling peak − outside torch (− CUDA graphs from 0.21)

Weights and the fraction are exact; the other terms are vllm_terms over fitted numbers, with their band.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from capplan.engines import vllm_terms
from capplan.engines.kv_rules import NEWEST, VERIFIED, KvRules, rules_for
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.vllm_defaults import (
    UNKNOWN,
    Number,
    beyond,
    calibration,
    facts,
    number,
    resolve,
    since,
)
from capplan.engines.vllm_kv import KvPlan, plan_kv, state_limited_sequences
from capplan.errors import InputError
from capplan.specs import Gpu, Model
from capplan.units import GIB, format_gib

SPAN = ("0.7.3", "0.13.0", "0.19.0")
"""Versions beside the newest that an unknown one may be like: one of each set of rules."""


def plan(
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
    visible_bytes: int | None = None,
    activation_bytes: int | None = None,
    non_torch_bytes: int | None = None,
) -> EnginePlan:
    """What vLLM makes of a GPU of `total_bytes` (as the driver reports them), on the widest rank.

    `visible_bytes`, `activation_bytes` and `non_torch_bytes` replace the estimates where a log gives them.
    Version "unknown" gives the newest rules with a band over all of them.
    Errors: InputError for versions older than the rules, lengths beyond the model's and contradicting flags.
    """
    unknown = flags.version == UNKNOWN
    named = flags.version is not None and not unknown
    text = str(flags.version) if named else str(facts()["newest"])
    made = _Planned(
        model,
        flags=replace(flags, version=text),
        weights_bytes=weights_bytes,
        extra_bytes=extra_bytes,
        total_bytes=total_bytes,
        gpu=gpu,
        visible_bytes=visible_bytes,
        activation_bytes=activation_bytes,
        non_torch_bytes=non_torch_bytes,
    )
    others = [made.at(version=version) for version in SPAN] if unknown else []
    band = made.band(others)
    return _answer(made, band, UNKNOWN if unknown else text, named)


class _Planned:
    """One set of flags worked out: its terms and pool; `at` works out a change."""

    def __init__(
        self,
        model: Model,
        *,
        flags: EngineFlags,
        weights_bytes: int,
        extra_bytes: int,
        total_bytes: int,
        gpu: Gpu | None,
        visible_bytes: int | None,
        activation_bytes: int | None,
        non_torch_bytes: int | None,
    ) -> None:
        self.model, self.asked, self.gpu = model, flags, gpu
        self.weights, self.extra, self.total = weights_bytes, extra_bytes, total_bytes
        self.given = (visible_bytes, activation_bytes, non_torch_bytes)
        self.version: Number = number(flags.version or "")
        self.visible = vllm_terms.visible_bytes(total_bytes) if visible_bytes is None else visible_bytes
        self.flags = resolve(model, flags, version=self.version, visible_bytes=self.visible, gpu=gpu)
        self.budget = int(self.number("gpu_memory_utilization") * self.visible)
        self.graphs = 0 if flags.enforce_eager else vllm_terms.graph_bytes()
        self.inside = since("graphs_in_fraction_since", self.version)
        self.activation = activation_bytes
        if self.activation is None:
            self.activation = vllm_terms.activation_bytes(
                model,
                tokens=int(self.number("max_num_batched_tokens")),
                sequences=0 if self.chunked_old() else int(self.number("max_num_seqs")),
                tp=flags.tp,
                version=self.version,
                **({"programs": gpu.sm_count} if gpu is not None and gpu.sm_count else {}),
            )
        self.non_torch = (
            vllm_terms.non_torch_bytes(flags.tp, self.version) if non_torch_bytes is None else non_torch_bytes
        )
        used = weights_bytes + extra_bytes + self.activation + self.non_torch
        self.pool = self.budget - used - (self.graphs if self.inside else 0)

    def chunked_old(self) -> bool:
        """Whether this is chunked prefill before 0.8, whose profiling run ends before the sampler."""
        long = self.number("max_model_len") > facts()["v0_chunked_beyond_tokens"]
        return long and not since("v1_since", self.version)

    def number(self, name: str) -> float:
        """A numeric flag as resolved."""
        return float(self.flags[name].value)

    def at(self, **changes: object) -> "_Planned":
        """The same with other flags."""
        visible, activation, non_torch = self.given
        return _Planned(
            self.model,
            flags=replace(self.asked, **changes),  # type: ignore[arg-type]
            weights_bytes=self.weights,
            extra_bytes=self.extra,
            total_bytes=self.total,
            gpu=self.gpu,
            visible_bytes=visible,
            activation_bytes=activation,
            non_torch_bytes=non_torch,
        )

    def terms(self) -> dict[str, int]:
        """The budget and what comes out of it."""
        made = {"total": self.visible, "budget": self.budget, "weights": self.weights}
        if self.extra:
            made["extra"] = self.extra
        made |= {"activation": self.activation or 0, "non_torch": self.non_torch}
        made["cuda_graphs" if self.inside else "cuda_graphs_outside"] = self.graphs
        return made

    def band(self, others: list["_Planned"]) -> Band:
        """The pool with the calibration's errors; wider in doubt, and over other versions' rules."""
        fit = calibration()["pool_error"]
        factor = fit["doubted"] if beyond(self.version) else 1.0
        given = None not in self.given[1:]
        low, high = (0.0, 0.0) if given else (fit["low"] * factor, fit["high"] * factor)
        pools = [self.pool, *(other.pool for other in others)]
        return Band(
            value=self.pool,
            low=min(pools) + round(low * self.budget),
            high=max(pools) + round(high * self.budget),
        )

    def safe_fraction(self) -> float:
        """The largest fraction, in hundredths, that leaves room for what lies outside it.

        That is the process's own context, and CUDA graphs before 0.21.
        """
        outside = calibration()["process_bytes"] + (0 if self.inside else self.graphs)
        return max(0, math.floor(100 * (1 - outside / self.visible)) / 100) if self.visible else 0.0

    def low_pool(self) -> int:
        """The pool at the lower end of its band."""
        return self.band([]).low

    def kv(self, pool: int) -> KvPlan:
        """The pool in blocks, and the check for one request."""
        return plan_kv(
            self.model,
            kv_bytes=pool,
            max_model_len=int(self.number("max_model_len")),
            kv_bits=self.asked.kv_bits,
            tp=self.asked.tp,
            pp=self.asked.pp,
            block_size=int(self.number("block_size")),
            max_num_batched_tokens=int(self.number("max_num_batched_tokens")),
            rules=self.rules,
        )

    @property
    def rules(self) -> KvRules:
        """The KV layout's rules of this version."""
        return NEWEST if beyond(self.version) else rules_for(".".join(map(str, self.version)))

    def starts(self, pool: int) -> bool:
        """Whether vLLM starts with that pool."""
        return self.weights + self.extra <= self.visible and pool > 0 and self.kv(pool).starts


def _answer(made: _Planned, band: Band, version: str, named: bool) -> EnginePlan:
    kv = made.kv(max(0, band.value))
    sure = {made.starts(band.low), made.starts(band.high)}
    starts = sure.pop() if len(sure) == 1 else None
    at_value = made.starts(band.value)
    limit = made.model.max_context
    longest = kv.longest_model_len if band.value > 0 else None
    if longest is not None and limit is not None:
        longest = min(longest, limit)
    return EnginePlan(
        engine="vllm",
        version=version,
        flags=tuple(made.flags.values()),
        terms=made.terms(),
        kv_pool=band,
        kv_tokens=kv.tokens if band.value > 0 else 0,
        max_concurrency=kv.max_concurrency if band.value > 0 else 0.0,
        starts=starts,
        kv=kv,
        reason=None if at_value else _reason(made, band.value, kv, longest),
        longest_model_len=longest,
        safe_max_num_seqs=_safe_sequences(made),
        advice=() if starts else _advice(made),
        rules=_rules(),
        notes=_notes(made, band, version, named),
        more={"starts_at_estimate": at_value, "safe_gpu_memory_utilization": made.safe_fraction()},
    )


def _reason(made: _Planned, pool: int, kv: KvPlan, longest: int | None) -> str:
    if made.weights + made.extra > made.visible:
        return (
            f"out of memory while loading weights: {format_gib(made.weights + made.extra)} of "
            f"{format_gib(made.visible)}"
        )
    if pool <= 0:
        return f"no memory for cache blocks: {format_gib(pool)} remain of the budget"
    length = int(made.number("max_model_len"))
    text = (
        f"one request of {length:,} tokens needs {format_gib(kv.need_bytes)} of KV cache, more than the "
        f"{format_gib(pool)} available"
    )
    return f"{text}; the longest that starts is {longest:,}" if longest else text


def _safe_sequences(made: _Planned) -> int | None:
    """Most sequences, up to those resolved, with which the lower end of the band starts."""
    now = int(made.number("max_num_seqs"))
    state = state_limited_sequences(made.kv(max(0, made.low_pool())))
    if state is not None:
        now = min(now, state)

    def holds(sequences: int) -> bool:
        change = made.at(max_num_seqs=sequences)
        return change.starts(change.low_pool())

    if now < 1 or not holds(1):
        return None
    if holds(now):
        return now
    return _largest(holds, now)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that holds; 1 does."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _advice(made: _Planned) -> tuple[Advice, ...]:
    """Single flags with which the lower end of the band starts, each with the pool after it."""
    tries: list[tuple[str, str, dict[str, object]]] = []
    low = made.low_pool()
    longest = made.kv(low).longest_model_len if low > 0 else None
    if longest is not None and longest < made.number("max_model_len"):
        tries.append(("a shorter longest request", f"--max-model-len {longest}", {"max_model_len": longest}))
    sequences = _safe_sequences(made)
    if sequences is not None and sequences < made.number("max_num_seqs"):
        tries.append(("fewer sequences at once", f"--max-num-seqs {sequences}", {"max_num_seqs": sequences}))
    tokens = 2048
    if made.number("max_num_batched_tokens") > tokens >= made.number("max_num_seqs"):
        flag = f"--max-num-batched-tokens {tokens}"
        tries.append(("fewer tokens a step", flag, {"max_num_batched_tokens": tokens}))
    for percent in range(90, 100):
        fraction = percent / 100
        if made.safe_fraction() >= fraction > made.number("gpu_memory_utilization"):
            flag = f"--gpu-memory-utilization {fraction:g}"
            tries.append(("a larger share of the memory", flag, {"gpu_memory_utilization": fraction}))
    if made.asked.kv_bits > 8:
        tries.append(("KV cache in fp8", "--kv-cache-dtype fp8", {"kv_bits": 8}))
    if not made.asked.enforce_eager and made.inside:
        tries.append(("no CUDA graphs (slower decode)", "--enforce-eager", {"enforce_eager": True}))
    found: dict[str, Advice] = {}
    for change, flag, fields in tries:
        try:
            after = made.at(**fields)
        except InputError:
            continue  # this version does not take the change
        pool = after.low_pool()
        if change not in found and after.starts(pool):
            found[change] = Advice(
                change=f"{change}: KV pool of at least {format_gib(pool)}, "
                f"{after.kv(pool).max_concurrency:.2f} requests of "
                f"{int(after.number('max_model_len')):,} tokens",
                flag=flag,
            )
    return tuple(found.values())


def _rules() -> tuple[Rule, ...]:
    source = str(facts()["source"])
    verified = str(facts()["verified"])
    return (
        Rule(rule="budget = fraction × memory as CUDA sees it", verified=verified, source=source),
        Rule(
            rule="profiling peak: scheduled tokens through the widest layer, or max_num_seqs × vocabulary "
            "through the sampler",
            verified="0.6–0.13 and 0.19",
            source=str(calibration().get("source", "start-up logs")),
        ),
        Rule(rule="CUDA graphs inside the fraction from 0.21", verified="0.21–0.32", source=source),
        Rule(rule="KV groups, blocks, tokens, concurrency", verified=VERIFIED, source="vLLM's sources"),
    )


def _notes(made: _Planned, band: Band, version: str, named: bool) -> tuple[str, ...]:
    notes = []
    if version == UNKNOWN:
        notes.append("version unknown: newest rules, and a band over those of older versions")
    elif not named:
        notes.append(f"vLLM {version}, the newest known here: --engine-version for another")
    if beyond(made.version):
        notes.append(f"vLLM {version} is newer than the rules ({facts()['newest']}): a wider band")
    elif made.version < (0, 6, 0):
        notes.append("rules of versions before 0.6 are not verified")
    if made.model.towers:
        notes.append("encoders are not in the profiling peak: their worst input may take more")
    outside = made.visible - made.budget
    if not made.inside and made.graphs and outside < made.graphs:
        notes.append(
            f"graphs are captured outside the fraction: about {format_gib(made.graphs)} of the "
            f"{format_gib(outside)} it leaves; too little may stop the start"
        )
    if band.low < band.value:
        notes.append(
            f"KV pool between {band.low / GIB:.2f} and {band.high / GIB:.2f} GiB (8 of 10 start-up logs)"
        )
    return tuple(notes)


__all__ = ["Flag", "plan"]
