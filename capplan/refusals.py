"""Why an engine did not start, in its own terms, and the single flags that change it, each with numbers.

Everything here follows from the log alone; doctor.py adds what a plan of the model can say.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.engines.log_record import EngineLog, Refusal
from capplan.memory_calibration import beside, budget_of
from capplan.units import format_gib

HIGHEST_FRACTION: Final = 0.97
"""The driver, other contexts and allocations outside the fraction need the rest."""

FLAGS: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {
        "max_model_len": "--max-model-len {}",
        "gpu_memory_utilization": "--gpu-memory-utilization {}",
        "max_num_seqs": "--max-num-seqs {}",
        "max_num_batched_tokens": "--max-num-batched-tokens {}",
        "kv_bits": "--kv-cache-dtype fp8",
        "enforce_eager": "--enforce-eager",
        "tp": "--tensor-parallel-size {}",
    },
    "sglang": {
        "max_model_len": "--context-length {}",
        "gpu_memory_utilization": "--mem-fraction-static {}",
        "max_num_seqs": "--max-running-requests {}",
        "max_num_batched_tokens": "--chunked-prefill-size {}",
        "kv_bits": "--kv-cache-dtype fp8_e5m2",
        "enforce_eager": "--disable-cuda-graph",
        "tp": "--tp-size {}",
    },
    "tensorrt-llm": {
        "max_model_len": "--max_seq_len {}",
        "gpu_memory_utilization": "--kv_cache_free_gpu_memory_fraction {}",
        "max_num_seqs": "--max_batch_size {}",
        "max_num_batched_tokens": "--max_num_tokens {}",
        "tp": "--tp_size {}",
    },
    "tgi": {
        "max_model_len": "--max-total-tokens {}",
        "gpu_memory_utilization": "--cuda-memory-fraction {}",
        "max_num_seqs": "--max-batch-size {}",
        "max_num_batched_tokens": "--max-batch-prefill-tokens {}",
        "kv_bits": "--kv-cache-dtype fp8_e5m2",
        "tp": "--num-shard {}",
    },
    "llama.cpp": {
        "max_model_len": "--ctx-size {}",
        "max_num_batched_tokens": "--ubatch-size {}",
        "kv_bits": "--cache-type-k q8_0 --cache-type-v q8_0",
        "gpu_layers": "--n-gpu-layers {}",
    },
}
"""A flag of EngineFlags as each engine spells it; engines lack some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One flag to change: how the engine spells it, what it does in numbers, and whether it starts then.

    `starts` None: the log does not say enough to tell. `basis` is "log" or "plan".
    """

    flag: str
    change: str
    starts: bool | None
    basis: str = "log"
    kv_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON of one fix."""
        return {
            "flag": self.flag,
            "change": self.change,
            "starts": self.starts,
            "basis": self.basis,
            "kv_tokens": self.kv_tokens,
        }


def spelled(engine: str, name: str, value: object = "") -> str | None:
    """A flag with its value as the engine takes it; None where it has no such flag."""
    pattern = FLAGS.get(engine, {}).get(name)
    return None if pattern is None else pattern.format(value)


def fraction_of(log: EngineLog) -> float | None:
    """The engine's memory fraction, whatever it is called."""
    for name in (
        "gpu_memory_utilization",
        "mem_fraction_static",
        "free_gpu_memory_fraction",
        "cuda_memory_fraction",
    ):
        value = log.number(name)
        if value is not None and 0 < value <= 1:
            return value
    return None


def number(refusal: Refusal, log: EngineLog, name: str) -> float | None:
    """A number of the refusal itself, else of the log."""
    value = refusal.numbers.get(name)
    if value is None or isinstance(value, str | bool):
        return log.number(name)
    return value


def explanation(log: EngineLog) -> tuple[str, ...]:
    """What the engine's reason means, in sentences with the log's numbers."""
    refusal = log.refusal
    if refusal is None:
        return ()
    made = _EXPLAIN.get(refusal.reason, _explain_other)(refusal, log)
    return tuple(made)


def fixes(log: EngineLog, *, vocab: int | None = None) -> tuple[Fix, ...]:
    """Single flag changes that follow from the log's own numbers."""
    refusal = log.refusal
    if refusal is None:
        return ()
    if log.engine == "llama.cpp":
        return tuple(_fix_llama(refusal, log, vocab))
    return tuple(_FIX.get(refusal.reason, _no_fix)(refusal, log, vocab))


# --- what it means -----------------------------------------------------------------------------------


def _explain_context(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    length = number(refusal, log, "max_model_len")
    need, pool = number(refusal, log, "kv_needed_bytes"), number(refusal, log, "kv_pool_bytes")
    tokens = number(refusal, log, "kv_tokens")
    if length is not None and need is not None and pool is not None:
        yield (
            f"one request of {length:,.0f} tokens needs {format_gib(need)} of KV cache, the pool is "
            f"{format_gib(pool)}: {format_gib(need - pool)} short"
        )
    elif length is not None and tokens is not None:
        yield f"one request of {length:,.0f} tokens does not fit into a pool of {tokens:,.0f}"
    yield from _sum_of_budget(log)


def _explain_no_pool(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    yield "weights and what lies beside them fill the share of memory the engine may use"
    yield from _sum_of_budget(log)


def _sum_of_budget(log: EngineLog) -> Iterator[str]:
    budget, weights, rest = budget_of(log), log.number("weights_bytes"), beside(log)
    pool = log.number("kv_pool_bytes")
    if budget is None or weights is None or pool is None:
        return
    between = rest if rest is not None else budget - weights - pool
    yield (
        f"budget {format_gib(budget)} = weights {format_gib(weights)} + activations, non-torch and graphs "
        f"{format_gib(between)} + KV pool {format_gib(pool)}"
    )


def _explain_free(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    free, total = number(refusal, log, "gpu_free_bytes"), number(refusal, log, "gpu_total_bytes")
    budget = number(refusal, log, "budget_bytes")
    if free is None or total is None:
        return
    text = f"{format_gib(free)} of {format_gib(total)} was free at start"
    if budget is not None:
        text += f", the engine may use {format_gib(budget)}: {format_gib(budget - free)} too much"
    yield text
    yield (
        f"{format_gib(total - free)} is held by something else: another process, an earlier start that has "
        "not ended, a desktop"
    )


def _explain_states(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    seqs, slots = number(refusal, log, "max_num_seqs"), number(refusal, log, "state_slots")
    if seqs is not None and slots is not None:
        yield f"each of {seqs:,.0f} sequences needs a block for its state; the pool has {slots:,.0f}"


def _explain_sampler(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    seqs = number(refusal, log, "max_num_seqs")
    yield (
        "the sampler's warm-up takes max_num_seqs × vocabulary × 12 bytes on every rank"
        + (f", here for {seqs:,.0f} sequences" if seqs is not None else "")
    )
    yield from _explain_oom(refusal, log)


def _explain_oom(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    tried, free = number(refusal, log, "oom_tried_bytes"), number(refusal, log, "oom_free_bytes")
    if tried is not None:
        text = f"an allocation of {format_gib(tried)} failed"
        yield text + (f" with {format_gib(free)} free" if free is not None else "")
    held, torch = number(refusal, log, "oom_process_bytes"), number(refusal, log, "oom_torch_bytes")
    total = number(refusal, log, "oom_total_bytes")
    if held is not None and total is not None:
        text = f"this process held {format_gib(held)} of {format_gib(total)}"
        yield text + (f", {format_gib(torch)} of it in PyTorch's hands" if torch is not None else "")
    other = number(refusal, log, "oom_other_process_bytes")
    if other:
        yield f"another process held {format_gib(other)}"
    idle = number(refusal, log, "oom_unallocated_bytes")
    if idle is not None and tried is not None and idle >= tried:
        yield f"{format_gib(idle)} was reserved but in pieces too small: fragmentation"
    yield _stage(log)


def _stage(log: EngineLog) -> str:
    if "kv_pool_bytes" in log.fields or "kv_blocks" in log.fields or "kv_tokens" in log.fields:
        return "it came after the KV pool was sized: CUDA graphs, sampler or encoder had no room left"
    if "weights_bytes" in log.fields:
        return "it came after the weights and before the KV pool: the profiling run had no room"
    return "no line on loaded weights comes before it: the weights themselves did not fit"


def _explain_other(refusal: Refusal, log: EngineLog) -> Iterator[str]:
    yield refusal.reason.replace("_", " ")
    yield from _sum_of_budget(log)


_EXPLAIN: Final[Mapping[str, Callable[[Refusal, EngineLog], Iterator[str]]]] = {
    "context_exceeds_kv_cache": _explain_context,
    "no_memory_for_kv_cache": _explain_no_pool,
    "no_memory_for_state_cache": _explain_no_pool,
    "free_memory_below_budget": _explain_free,
    "state_blocks_below_max_num_seqs": _explain_states,
    "out_of_memory_in_sampler": _explain_sampler,
    "out_of_memory_in_cuda_graphs": _explain_oom,
    "out_of_memory": _explain_oom,
    "kv_cache_not_allocated": _explain_oom,
    "compute_buffer_not_allocated": _explain_oom,
    "weights_not_allocated": _explain_oom,
}


# --- what changes it ---------------------------------------------------------------------------------


def _made(log: EngineLog, name: str, value: object, change: str, starts: bool | None) -> Iterator[Fix]:
    flag = spelled(log.engine, name, value)
    if flag is not None:
        yield Fix(flag=flag, change=change, starts=starts)


def _fix_context(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    length = number(refusal, log, "max_model_len")
    need, pool = number(refusal, log, "kv_needed_bytes"), number(refusal, log, "kv_pool_bytes")
    largest = number(refusal, log, "largest_max_model_len") or number(refusal, log, "kv_tokens")
    if largest is None and length is not None and need and pool is not None:
        largest = max(0.0, length * pool / need) // 256 * 256
    if largest and (length is None or largest < length):
        yield from _made(log, "max_model_len", int(largest), "what the pool holds of one request", True)
    if need is not None and pool is not None:
        yield from _raised_fraction(log, need - pool)
        if need / 2 <= pool and not _is_8_bit(log):
            change = f"one request then needs {format_gib(need / 2)} (layers that keep every token)"
            yield from _made(log, "kv_bits", "", change, True)


def _is_8_bit(log: EngineLog) -> bool:
    reading = log.fields.get("kv_cache_dtype")
    return reading is not None and any(part in str(reading.value) for part in ("8", "4"))


def _raised_fraction(log: EngineLog, missing: float) -> Iterator[Fix]:
    """The least fraction, in hundredths, that adds `missing` bytes to the pool (vLLM's is of the total)."""
    fraction, total = fraction_of(log), log.number("gpu_total_bytes")
    if log.engine != "vllm" or fraction is None or not total:
        return
    asked = math.ceil(round((fraction + missing / total) * 100, 6)) / 100
    free = log.number("gpu_free_bytes")
    room = asked <= HIGHEST_FRACTION and (free is None or asked * total <= free)
    change = f"instead of {fraction:g}: {format_gib((asked - fraction) * total)} more for the pool"
    if room:
        yield from _made(log, "gpu_memory_utilization", f"{asked:.2f}", change, True)


def _fix_no_pool(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    least = number(refusal, log, "least_mem_fraction_static")
    if least is not None and least < 1:
        asked = math.ceil(round(least * 100, 6)) / 100
        yield from _made(
            log, "gpu_memory_utilization", f"{asked:.2f}", "above the engine's own least", asked < 1
        )


def _fix_free(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    free, total = number(refusal, log, "gpu_free_bytes"), number(refusal, log, "gpu_total_bytes")
    if free is None or not total:
        return
    asked = math.floor(round(free / total * 100, 6)) / 100
    if asked > 0:
        change = f"{format_gib(asked * total)} of the {format_gib(free)} that is free; or free the rest"
        yield from _made(log, "gpu_memory_utilization", f"{asked:.2f}", change, None)


def _fix_states(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    slots = number(refusal, log, "state_slots")
    if slots:
        yield from _made(log, "max_num_seqs", int(slots), "as many as there are state blocks", True)


def _fix_sampler(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    free, seqs = number(refusal, log, "oom_free_bytes"), number(refusal, log, "max_num_seqs")
    if free is not None and vocab:
        most = int(free // (vocab * 12))
        asked = 1 << (most.bit_length() - 1) if most else 0
        if asked and (seqs is None or asked < seqs):
            need = format_gib(asked * vocab * 12)
            yield from _made(log, "max_num_seqs", asked, f"the sampler then takes {need}", True)
    yield from _fix_oom(refusal, log, vocab)


def _fix_oom(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    tried, free = number(refusal, log, "oom_tried_bytes"), number(refusal, log, "oom_free_bytes")
    fraction = fraction_of(log)
    total = number(refusal, log, "oom_total_bytes") or log.number("gpu_total_bytes")
    pool, concurrency = log.number("kv_pool_bytes"), log.number("max_concurrency")
    if tried and free is not None and fraction is not None and total and pool is not None:
        less = math.ceil(round((tried - free) / total * 100, 6)) / 100 + 0.01
        asked = round(fraction - less, 2)
        left = pool - less * total
        one = pool / concurrency if concurrency else None
        enough = left > 0 and (one is None or left >= one)
        if asked > 0 and enough:
            change = f"instead of {fraction:g}: leaves {format_gib(less * total)} outside the pool"
            yield from _made(
                log, "gpu_memory_utilization", f"{asked:.2f}", change, True if one is not None else None
            )
    if "kv_pool_bytes" in log.fields:
        yield from _made(log, "enforce_eager", "", "no CUDA graphs; decoding is slower", None)


def _fix_llama(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    context, micro = log.number("context_tokens"), log.number("micro_batch_tokens")
    tried, free = number(refusal, log, "oom_tried_bytes"), log.number("gpu_free_bytes")
    weights, compute = log.number("weights_bytes") or 0, log.number("compute_bytes") or 0
    left = None if free is None else free - weights - compute
    if refusal.reason == "kv_cache_not_allocated" and context and tried and left is not None and left > 0:
        asked = int(context * left / tried) // 256 * 256
        if 0 < asked < context:
            change = f"the KV buffer then takes {format_gib(tried * asked / context)}"
            yield from _made(log, "max_model_len", asked, change, None)
    if refusal.reason != "weights_not_allocated":
        yield from _made(log, "kv_bits", "", "halves a 16-bit KV buffer", None)
    if refusal.reason == "compute_buffer_not_allocated" and micro and micro > 64:
        yield from _made(log, "max_num_batched_tokens", int(micro // 2), "halves the compute buffer", None)
    layers, offloaded = log.number("layers"), log.number("gpu_layers")
    if layers and offloaded:
        yield from _made(
            log, "gpu_layers", int(offloaded * 0.75), f"instead of {offloaded:.0f} of {layers:.0f}", None
        )


def _fix_tgi(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    prefill = number(refusal, log, "prefill_tokens")
    if prefill and prefill >= 2:
        yield from _made(log, "max_num_batched_tokens", int(prefill // 2), "half of what failed", None)


def _no_fix(refusal: Refusal, log: EngineLog, vocab: int | None) -> Iterator[Fix]:
    return iter(())


_FIX: Final[Mapping[str, Callable[[Refusal, EngineLog, int | None], Iterator[Fix]]]] = {
    "context_exceeds_kv_cache": _fix_context,
    "no_memory_for_kv_cache": _fix_no_pool,
    "free_memory_below_budget": _fix_free,
    "state_blocks_below_max_num_seqs": _fix_states,
    "out_of_memory_in_sampler": _fix_sampler,
    "out_of_memory_in_cuda_graphs": _fix_oom,
    "out_of_memory": _fix_oom,
    "prefill_exceeds_memory": _fix_tgi,
}
