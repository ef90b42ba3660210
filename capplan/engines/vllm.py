"""vLLM's start-up as a plan: budget, what it profiles away, the KV pool, and whether it starts.

    KV pool = fraction · visible total − weights − profiling peak − outside torch (− CUDA graphs from 0.21)

Weights and the fraction are exact; the other terms are vllm_terms over fitted numbers, with their band.
"""

from dataclasses import replace

from capplan.engines.kv_rules import VERIFIED
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.vllm_defaults import UNKNOWN, beyond, calibration, facts
from capplan.engines.vllm_kv import KvPlan, state_limited_sequences
from capplan.engines.vllm_start import Planned
from capplan.errors import InputError
from capplan.formulas.search import largest
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
    made = Planned(
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


def _answer(made: Planned, band: Band, version: str, named: bool) -> EnginePlan:
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
        more={
            "starts_at_estimate": at_value,
            "safe_gpu_memory_utilization": made.safe_fraction(),
            "same_pool_gpu_memory_utilization": made.same_pool(),
        },
    )


def _reason(made: Planned, pool: int, kv: KvPlan, longest: int | None) -> str:
    if made.weights + made.extra > made.visible:
        return (
            f"out of memory while loading weights: {format_gib(made.weights + made.extra)} of "
            f"{format_gib(made.visible)}"
        )
    if not made.free_at_start():
        free = made.visible - calibration()["process_bytes"]
        return (
            f"about {format_gib(free)} is free when the process has started, less than the "
            f"{format_gib(made.budget)} its fraction asks for"
        )
    if pool <= 0:
        return f"no memory for cache blocks: {format_gib(pool)} remain of the budget"
    length = int(made.number("max_model_len"))
    text = (
        f"one request of {length:,} tokens needs {format_gib(kv.need_bytes)} of KV cache, more than the "
        f"{format_gib(pool)} available"
    )
    return f"{text}; the longest that starts is {longest:,}" if longest else text


def _safe_sequences(made: Planned) -> int | None:
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
    return now if holds(now) else largest(holds, limit=now, guess=now // 2)


def _advice(made: Planned) -> tuple[Advice, ...]:
    """Single flags with which the lower end of the band starts, each with the pool after it."""
    tries: list[tuple[str, str, dict[str, object]]] = []
    if not made.free_at_start():
        fraction = made.safe_fraction()
        flag = f"--gpu-memory-utilization {fraction:g}"
        tries.append(("no more than is free", flag, {"gpu_memory_utilization": fraction}))
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
            verified="0.6–0.13 and 0.17–0.19",
            source=str(calibration().get("source", "start-up logs")),
        ),
        Rule(
            rule="first start: torch.compile times kernels on a copy of the embeddings",
            verified="read in 0.12, 0.14, 0.19 and 0.32; seen at work in one newer than 0.20",
            source=source,
        ),
        Rule(rule="CUDA graphs inside the fraction from 0.21", verified="0.21–0.32", source=source),
        Rule(rule="KV groups, blocks, tokens, concurrency", verified=VERIFIED, source="vLLM's sources"),
    )


def _notes(made: Planned, band: Band, version: str, named: bool) -> tuple[str, ...]:
    notes = []
    if version == UNKNOWN:
        notes.append("version unknown: newest rules, and a band over those of older versions")
    elif not named:
        notes.append(f"vLLM {version}, the newest known here: --engine-version for another")
    if beyond(made.version):
        notes.append(f"vLLM {version} is newer than the rules ({facts()['newest']}): a wider band")
    elif made.version < (0, 6, 0):
        notes.append("rules of versions before 0.6 are not verified")
    if any(tower.role != "mtp" for tower in made.model.towers):
        notes.append("encoders are not in the profiling peak: their worst input may take more")
    first = made.first_start_bytes()
    if first:
        notes.append(
            f"a first start: compiling takes {format_gib(first)} more than the profiling run; a restart with "
            "the compiled code at hand leaves it to the KV pool"
        )
    outside = made.visible - made.budget
    if not made.inside and made.graphs and outside < made.graphs:
        notes.append(
            f"graphs are captured outside the fraction: about {format_gib(made.graphs)} of the "
            f"{format_gib(outside)} it leaves; too little may stop the start"
        )
    elif made.inside and made.number("gpu_memory_utilization") > made.safe_fraction() > 0:
        notes.append(
            f"{format_gib(outside)} lies outside the fraction: too little for the process and what capturing "
            f"graphs takes beyond its estimate; {made.safe_fraction():g} is safer"
        )
    if band.low < band.value:
        notes.append(
            f"KV pool between {band.low / GIB:.2f} and {band.high / GIB:.2f} GiB (8 of 10 start-up logs)"
        )
    return tuple(notes)


__all__ = ["Flag", "plan"]
