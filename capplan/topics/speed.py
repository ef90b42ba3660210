"""Topics on speed: prefill and decode, bounds, TTFT, TPOT, throughput, percentiles."""

from statistics import fmean
from typing import Final

from capplan.formulas import latency, memory, roofline, speculative
from capplan.topics.kv_cache import LLAMA_3_8B
from capplan.topics.quantization import A100_BYTES_PER_S, A100_FLOP_PER_S, WIDE
from capplan.topics.topic import Line, Topic, topic

_70B_FP16: Final = memory.weight_bytes(parameters=70e9, bits=16)


def _read_s(size: float) -> float:
    return roofline.bandwidth_bound_s(bytes_moved=size, bytes_per_s=A100_BYTES_PER_S)


def _intensity(m: int) -> float:
    return roofline.arithmetic_intensity(
        flop=roofline.gemm_flop(m=m, **WIDE),
        bytes_moved=roofline.gemm_bytes(m=m, **WIDE, weight_bits=16),
    )


def _phases() -> tuple[Line, ...]:
    ridge = roofline.ridge_intensity(flop_per_s=A100_FLOP_PER_S, bytes_per_s=A100_BYTES_PER_S)
    return (
        Line("decode of one token (GEMV)", _intensity(1), "FLOP/B"),
        Line("prefill of 4,096 tokens (GEMM)", _intensity(4096), "FLOP/B"),
        Line("an A100 is memory-bound below", ridge, "FLOP/B"),
        Line("read for each decode step of 70B in fp16", _70B_FP16, "B"),
        Line("which takes at 2.0 TB/s", _read_s(_70B_FP16), "s"),
    )


def _roofline() -> tuple[Line, ...]:
    flop, size = 2 * 70e9, _70B_FP16
    return (
        Line(
            "70B in fp16, one token: arithmetic alone",
            roofline.compute_bound_s(flop=flop, flop_per_s=A100_FLOP_PER_S),
            "s",
        ),
        Line(
            "with the memory",
            roofline.bound_s(
                flop=flop, bytes_moved=size, flop_per_s=A100_FLOP_PER_S, bytes_per_s=A100_BYTES_PER_S
            ),
            "s",
        ),
        Line(
            "4,096 tokens at once: the arithmetic decides",
            roofline.bound_s(
                flop=4096 * flop, bytes_moved=size, flop_per_s=A100_FLOP_PER_S, bytes_per_s=A100_BYTES_PER_S
            ),
            "s",
        ),
    )


def _trap() -> tuple[Line, ...]:
    weights = memory.weight_bytes(parameters=70e9, bits=16)
    step = _read_s(weights)
    return (
        Line("weights of 70B in fp16", weights, "B"),
        Line("read once at 2.0 TB/s", step, "s"),
        Line("ceiling for one user", latency.throughput_token_per_s(tokens=1, time_s=step), "token/s"),
        Line(
            "ceiling for 16 users, who share the read",
            latency.throughput_token_per_s(tokens=16, time_s=step),
            "token/s",
        ),
        Line(
            "the same in INT4, one user",
            latency.throughput_token_per_s(tokens=1, time_s=_read_s(weights / 4)),
            "token/s",
        ),
    )


def _attention() -> tuple[Line, ...]:
    flop = roofline.attention_flop(queries=1, context=4096, heads=32, head_dim=128)
    size = memory.kv_bytes_per_token(**{**LLAMA_3_8B, "layers": 1}) * 4096
    return (
        Line("Llama-3-8B, one token against 4,096, one layer", flop, "FLOP"),
        Line("K and V it reads", size, "B"),
        Line(
            "intensity: the query heads that share a KV head",
            roofline.arithmetic_intensity(flop=flop, bytes_moved=size),
            "FLOP/B",
        ),
    )


def _trade() -> tuple[Line, ...]:
    weights = memory.weight_bytes(parameters=8e9, bits=16)
    lines = []
    for batch in (1, 16, 64, 128):
        kv = memory.kv_cache_bytes(**LLAMA_3_8B, batch=batch, context=4096)
        step = roofline.bound_s(
            flop=2 * 8e9 * batch,
            bytes_moved=weights + kv,
            flop_per_s=A100_FLOP_PER_S,
            bytes_per_s=A100_BYTES_PER_S,
        )
        rate = latency.throughput_token_per_s(tokens=batch, time_s=step)
        lines.append(Line(f"TPOT at batch {batch}", step, "s"))
        lines.append(Line(f"throughput at batch {batch}", rate, "token/s"))
    return tuple(lines)


def _slo() -> tuple[Line, ...]:
    return (
        Line(
            "300 tokens with TTFT 500 ms and TPOT 50 ms",
            latency.e2e_s(ttft_s=0.5, tpot_s=0.05, output_tokens=300),
            "s",
        ),
        Line("least TPOT of 70B in fp16 on one A100: misses 50 ms", _read_s(_70B_FP16), "s"),
        Line("over 4 of them: holds it", _read_s(_70B_FP16 / 4), "s"),
    )


def _percentiles() -> tuple[Line, ...]:
    values = [0.3] * 98 + [15.0] * 2
    return (
        Line("98 requests of 0.3 s and 2 of 15 s: mean", fmean(values), "s"),
        *(
            Line(f"P{percent}", latency.percentile(values=values, percent=percent), "s")
            for percent in (50, 95, 99)
        ),
    )


def _drafts() -> tuple[Line, ...]:
    made = speculative.tokens_per_step(drafted=3, acceptance_rate=0.7)
    return (
        Line("3 drafted, each accepted by 0.7: tokens a step", made, "token"),
        Line("of the drafted, accepted", (made - 1) / 3, "1"),
        Line("70B in fp16 at 2.0 TB/s, drafts for nothing: TPOT", _read_s(_70B_FP16) / made, "s"),
        Line(
            "3 drafted, each accepted by 0.2: tokens a step",
            speculative.tokens_per_step(drafted=3, acceptance_rate=0.2),
            "token",
        ),
    )


def _reading() -> tuple[Line, ...]:
    pace = latency.reading_tpot_s()
    return (
        Line("200 words a minute: TPOT", pace, "s"),
        Line("which is", latency.throughput_token_per_s(tokens=1, time_s=pace), "token/s"),
    )


def _token_rate() -> tuple[Line, ...]:
    return tuple(
        Line(
            f"70B in fp16 at 2.0 TB/s, {rate} tokens/s for one user",
            roofline.bandwidth_fraction(bytes_moved=_70B_FP16 * rate, time_s=1, bytes_per_s=A100_BYTES_PER_S),
            "1",
        )
        for rate in (5, 10)
    )


SPEED: Final[tuple[Topic, ...]] = (
    topic(
        "phases",
        "Prefill is compute-bound, decode memory-bound",
        (roofline.arithmetic_intensity, roofline.gemm_flop, roofline.gemm_bytes, roofline.ridge_intensity),
        _phases,
        aliases=("prefill", "decode", "prefill-decode", "two-phases", "arithmetic-intensity"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "roofline",
        "The bound of one step",
        (roofline.bound_s, roofline.compute_bound_s),
        _roofline,
        aliases=("bound", "compute-bound", "physics"),
        command="capplan latency --model 8b --gpu h100 --bounds",
    ),
    topic(
        "bandwidth-trap",
        "The memory bandwidth trap of decode",
        (roofline.bandwidth_bound_s, memory.weight_bytes, latency.throughput_token_per_s),
        _trap,
        aliases=("memory-bound", "hbm", "decode-ceiling", "bandwidth-bound"),
        command="capplan latency --model 70b --gpu a100-sxm-80gb --precision fp16 --bounds",
    ),
    topic(
        "kv-cache-purpose",
        "Why the KV cache exists",
        (roofline.uncached_projections,),
        lambda: (
            Line(
                "K and V projections to token 1,001 without a cache",
                roofline.uncached_projections(tokens=1001),
                "token",
            ),
            Line(
                "of them to make token 1,001 alone",
                roofline.uncached_projections(tokens=1001) - roofline.uncached_projections(tokens=1000),
                "token",
            ),
        ),
        aliases=("why-kv-cache", "recomputation", "quadratic"),
        command="vram",
    ),
    topic(
        "attention",
        "Attention over the cached history",
        (roofline.attention_flop, roofline.arithmetic_intensity),
        _attention,
        aliases=("softmax", "qkv", "attention-flop"),
    ),
    topic(
        "autoregressive",
        "One token after another",
        (latency.e2e_s, roofline.bandwidth_bound_s),
        lambda: (
            Line(
                "token 50 of 70B in fp16 at 2.0 TB/s comes at the earliest after",
                latency.e2e_s(ttft_s=_read_s(_70B_FP16), tpot_s=_read_s(_70B_FP16), output_tokens=50),
                "s",
            ),
        ),
        holds="any decoder: P(x₁…x_T) = Π P(x_t | x₁…x_{t−1}), a step for every token.",
        aliases=("sequential", "chain-rule"),
    ),
    topic(
        "ttft",
        "Time to first token",
        (latency.ttft_s,),
        lambda: (
            Line(
                "received at 10.0 s, first token at 10.4 s",
                latency.ttft_s(received_at_s=10.0, first_token_at_s=10.4),
                "s",
            ),
        ),
        aliases=("time-to-first-token", "first-token"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "tpot",
        "Time per output token",
        (latency.tpot_s,),
        lambda: (
            Line(
                "101 tokens from 10.4 s to 15.4 s",
                latency.tpot_s(first_token_at_s=10.4, last_token_at_s=15.4, output_tokens=101) or 0,
                "s",
            ),
        ),
        aliases=("time-per-output-token", "itl", "inter-token-latency"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "e2e",
        "End-to-end latency",
        (latency.e2e_s,),
        lambda: (
            Line(
                "TTFT 0.4 s, TPOT 0.05 s, 101 tokens",
                latency.e2e_s(ttft_s=0.4, tpot_s=0.05, output_tokens=101),
                "s",
            ),
        ),
        aliases=("latency", "end-to-end", "t-total", "total-latency"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "throughput",
        "Aggregate throughput",
        (latency.throughput_token_per_s,),
        lambda: (
            Line(
                "64 users get 100 tokens each in 5 s",
                latency.throughput_token_per_s(tokens=6400, time_s=5),
                "token/s",
            ),
        ),
        aliases=("tokens-per-second", "aggregate-throughput"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "latency-throughput",
        "A larger batch: more tokens in all, slower for each",
        (roofline.bound_s, latency.throughput_token_per_s, memory.kv_cache_bytes),
        _trade,
        holds="Llama-3-8B in fp16, 4,096 tokens a user, bounds of an A100.",
        aliases=("trade-off", "batch-size", "batch-sweep"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32",
    ),
    topic(
        "slo",
        "A service level objective against the bound",
        (latency.e2e_s, roofline.bandwidth_bound_s),
        _slo,
        aliases=("sla", "service-level"),
        command="capplan latency --model 8b --gpu h100 --concurrency 32 --slo chat",
    ),
    topic(
        "percentiles",
        "Percentiles, not means",
        (latency.percentile,),
        _percentiles,
        aliases=("p95", "p99", "tail-latency", "p99-ttft", "mean-latency"),
    ),
    topic(
        "reading-speed",
        "As fast as it is read",
        (latency.reading_tpot_s, latency.throughput_token_per_s),
        _reading,
        aliases=("reading",),
        command="capplan latency --model 8b --gpu h100 --concurrency 32 --slo reading",
    ),
    topic(
        "token-rate",
        "Token generation rate against the bandwidth",
        (roofline.bandwidth_fraction,),
        _token_rate,
        aliases=("mbu", "generation-rate", "bandwidth-fraction"),
    ),
    topic(
        "speculative-decoding",
        "A draft guesses, the model verifies: more than one token a step",
        (speculative.tokens_per_step,),
        _drafts,
        aliases=("speculation", "draft-model", "mtp", "eagle", "acceptance-rate", "acceptance-length"),
        command="capplan latency --model 8b --gpu h100 --speculative-tokens 3 --acceptance-rate 0.7",
    ),
    topic(
        "streaming",
        "What a reader waits for with and without streaming",
        (latency.e2e_s, latency.ttft_s),
        lambda: (
            Line(
                "301 tokens at 25 ms without streaming",
                latency.e2e_s(ttft_s=0.5, tpot_s=0.025, output_tokens=301),
                "s",
            ),
            Line("with it", latency.ttft_s(received_at_s=0, first_token_at_s=0.5), "s"),
        ),
        aliases=("sse", "server-sent-events"),
    ),
)
