"""capplan's plan of the start that a log records, and of the same start with one flag changed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from capplan import refusals
from capplan.catalog import weight_format
from capplan.engines.log_record import EngineLog
from capplan.engines.plan import EngineFlags, EnginePlan, plan
from capplan.engines.vllm_defaults import UNKNOWN
from capplan.errors import CapplanError
from capplan.log_subject import Subject
from capplan.log_terms import value_of
from capplan.parts import parts_of
from capplan.refusals import Fix
from capplan.units import GIB, format_gib
from capplan.weights import WeightBudget, allowed_tp, weight_budget

_ROUNDS = 3  # each leaves a small share of the difference before
_GIVEN = "total_bytes_given"


def flags_of(log: EngineLog, kv_bits: float) -> EngineFlags:
    """The flags a start was given or settled on, as far as the log says."""

    def whole(*names: str) -> int | None:
        value = next((found for name in names if (found := log.number(name)) is not None), None)
        return None if value is None else round(value)

    llama = log.engine == "llama.cpp"
    version = value_of(log, "version")
    if version is None and log.engine == "vllm":
        version = UNKNOWN
    return EngineFlags(
        version=None if version is None else str(version),
        max_model_len=whole("context_tokens", "max_model_len") if llama else whole("max_model_len"),
        max_num_batched_tokens=whole("micro_batch_tokens" if llama else "max_num_batched_tokens"),
        max_num_seqs=whole("max_num_seqs"),
        gpu_memory_utilization=refusals.fraction_of(log),
        # vLLM prints the size that hybrids raise it to, which its rules work out.
        block_size=None if log.engine == "vllm" else whole("block_size"),
        enforce_eager=bool(value_of(log, "enforce_eager") or False),
        kv_bits=kv_bits,
        tp=whole("tp") or 1,
        pp=whole("pp") or 1,
        ep=whole("ep") or 1,
        dp=whole("dp") or 1,
        gpu_layers=whole("gpu_layers"),
    )


def planned(log: EngineLog, subject: Subject, notes: list[str] | None = None) -> EnginePlan:
    """capplan's plan of the start in a log: its flags, its version, its GPU's total.

    A version the rules do not know is planned as the newest, and `notes` says so.
    Errors: InputError where the engine, the flags or the split cannot be planned.
    """
    flags = flags_of(log, subject.kv_format.effective_bits)
    try:
        return _plan(log, subject, flags)
    except CapplanError as error:
        if flags.version is None or "version" not in f"{error.where} {error.message}":
            raise
        if notes is not None:
            notes.append(f"planned as the newest version: {error.message}")
        return _plan(log, subject, replace(flags, version=None))


def _plan(
    log: EngineLog,
    subject: Subject,
    flags: EngineFlags,
    *,
    spare_bytes: int = 0,
    total_bytes: int | None = None,
) -> EnginePlan:
    """A plan; `spare_bytes` is what the log shows to be taken beyond the plan's terms.

    `total_bytes` is what the planner is to be given for the log's total; worked out where it is None.
    """
    model, total = subject.model, subject.total_bytes
    assert model is not None
    assert total is not None
    weights = _rank_weights(weight_budget(model, subject.precision, tp=flags.tp), model.layers, flags.pp)
    extra = sum(parts_of(model, subject.precision, kv_bits=flags.kv_bits, tp=flags.tp).sizes.values())

    def made(given: int) -> EnginePlan:
        return plan(
            log.engine,
            model,
            weights_bytes=weights,
            extra_bytes=extra + spare_bytes,
            total_bytes=given,
            gpu=subject.gpu,
            flags=flags,
        )

    given = total if total_bytes is None else total_bytes
    answer = made(given)
    if subject.total_from_log and total_bytes is None:
        # The log's total is what the engine sees already; a planner expects the driver's larger figure.
        for _ in range(_ROUNDS):
            seen = answer.terms.get("total")
            if seen is None or seen == total:
                break
            given += total - seen
            answer = made(given)
    return replace(answer, more={**answer.more, _GIVEN: given})


def _rank_weights(budget: WeightBudget, layers: int, pp: int) -> int:
    """Weights of the widest pipeline stage: its share of the layers, and the larger of the two ends."""
    if pp == 1 or not layers:
        return budget.bytes
    ends = {part.role: part.bytes for part in budget.roles if part.role in ("embedding", "lm_head")}
    inside = budget.bytes - sum(ends.values())
    return inside * -(-layers // pp) // layers + max(ends.values(), default=0)


def tried(log: EngineLog, subject: Subject, made: EnginePlan) -> Iterator[Fix]:
    """Single flag changes, each planned anew from where the log's own pool stands.

    None for a failure that the plan does not see: that it accepts a change then means nothing.
    """
    # llama.cpp's pool is what is asked for, not what is left.
    said = None if log.engine == "llama.cpp" else _pool(log)
    spare = 0 if said is None else made.kv_pool.value - said
    flags = flags_of(log, subject.kv_format.effective_bits)
    if flags.version is not None and flags.version != made.version:
        flags = replace(flags, version=made.version)
    before = said if said is not None else made.kv_pool.value
    held = log.number("kv_tokens") or made.kv_tokens or 0
    failed = log.refusal is not None
    if failed and not _refuses(log, subject, made, flags, spare, anchored=said is not None):
        return
    for name, value, changed in _changes(log, subject, made, flags):
        spelled = refusals.spelled(log.engine, name, value)
        if spelled is None:
            continue
        try:
            after = _plan(log, subject, changed, spare_bytes=spare, total_bytes=made.more[_GIVEN])
        except CapplanError:
            continue
        # From the log's own pool there is no band left: the estimate decides.
        starts = after.starts if said is None else after.more.get("starts_at_estimate", after.starts)
        tokens = after.kv_tokens if starts else None
        gained = after.kv_pool.value - before
        if starts and not failed and not _roomier(gained, tokens, held):
            continue
        text = f"KV pool {format_gib(after.kv_pool.value)} ({'+' if gained >= 0 else '-'}"
        text += f"{format_gib(abs(gained))})"
        if tokens is not None:
            text += f", {tokens:,} tokens"
        yield Fix(flag=spelled, change=text, starts=starts, basis="plan", kv_tokens=tokens)


def _refuses(
    log: EngineLog, subject: Subject, made: EnginePlan, flags: EngineFlags, spare: int, *, anchored: bool
) -> bool:
    """Whether the plan refuses this start too: only then does a change that it accepts mean anything."""
    if log.refusal is not None and log.refusal.reason == "free_memory_below_budget":
        return True  # what others hold is in no plan; the change is of the fraction itself
    try:
        base = _plan(log, subject, flags, spare_bytes=spare, total_bytes=made.more[_GIVEN])
    except CapplanError:
        return True
    starts = base.more.get("starts_at_estimate", base.starts) if anchored else base.starts
    return starts is False


def _roomier(gained: int, tokens: int | None, held: float) -> bool:
    """Whether a change is worth a line: more than a hundredth of GiB, or of the tokens."""
    return gained > 0.01 * GIB or (tokens is not None and tokens > 1.01 * held)


def _pool(log: EngineLog) -> int | None:
    refusal = log.refusal
    value = refusals.number(refusal, log, "kv_pool_bytes") if refusal else log.number("kv_pool_bytes")
    return None if value is None else round(value)


def _changes(
    log: EngineLog, subject: Subject, made: EnginePlan, flags: EngineFlags
) -> Iterator[tuple[str, object, EngineFlags]]:
    fraction = flags.gpu_memory_utilization or _resolved(made, "gpu_memory_utilization")
    free, total = log.number("gpu_free_bytes"), log.number("gpu_total_bytes")
    refusal = log.refusal
    if refusal is not None and refusal.reason == "free_memory_below_budget" and free and total:
        lower = int(free / total * 100) / 100
        if lower > 0:
            yield "gpu_memory_utilization", f"{lower:.2f}", replace(flags, gpu_memory_utilization=lower)
        return
    if refusal is not None and log.engine == "llama.cpp":
        yield from _llama_changes(made, flags)
    elif refusal is not None and made.longest_model_len and _pool(log) is not None:
        spare = made.kv_pool.value - (_pool(log) or 0)
        before = _plan(log, subject, flags, spare_bytes=spare, total_bytes=made.more[_GIVEN])
        longest = before.longest_model_len
        if longest and (flags.max_model_len is None or longest < flags.max_model_len):
            longest = longest // 256 * 256 or longest
            yield "max_model_len", longest, replace(flags, max_model_len=longest)
    if fraction is not None and log.engine == "vllm":
        for higher in (0.92, 0.95, refusals.HIGHEST_FRACTION):
            if higher > fraction and (free is None or total is None or higher * total <= free):
                yield "gpu_memory_utilization", f"{higher:.2f}", replace(flags, gpu_memory_utilization=higher)
    if flags.kv_bits == 16:
        yield "kv_bits", "", replace(flags, kv_bits=weight_format("fp8").element_bits)
    batched = flags.max_num_batched_tokens or _resolved(made, "max_num_batched_tokens")
    if batched is not None and batched > 2048 and log.engine != "llama.cpp":
        yield "max_num_batched_tokens", 2048, replace(flags, max_num_batched_tokens=2048)
    seqs = flags.max_num_seqs or _resolved(made, "max_num_seqs")
    if seqs is not None and seqs > 64 and log.engine != "llama.cpp":
        yield "max_num_seqs", 64, replace(flags, max_num_seqs=64)
    if not flags.enforce_eager and log.engine in ("vllm", "sglang"):
        yield "enforce_eager", "", replace(flags, enforce_eager=True)
    assert subject.model is not None
    for tp in allowed_tp(subject.model, 8):
        if tp > flags.tp:
            yield "tp", tp, replace(flags, tp=tp)


def _llama_changes(made: EnginePlan, flags: EngineFlags) -> Iterator[tuple[str, object, EngineFlags]]:
    longest, layers = made.longest_model_len, _resolved(made, "gpu_layers")
    if longest and (flags.max_model_len is None or longest < flags.max_model_len):
        shorter = longest // 256 * 256 or longest
        yield "max_model_len", shorter, replace(flags, max_model_len=shorter)
    for quarters in (3, 2, 1):
        if layers:
            fewer = layers * quarters // 4
            yield "gpu_layers", fewer, replace(flags, gpu_layers=fewer)


def _resolved(made: EnginePlan, name: str) -> Any:
    return next((flag.value for flag in made.flags if flag.name == name), None)
