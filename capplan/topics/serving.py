"""Topics on the way from steps to users: closed and open loops, bursts, static batches, the knee, goodput."""

from typing import Final

from capplan.formulas import queueing, serving
from capplan.topics.topic import Line, Topic, topic

_PLAIN: Final = serving.Scheduling(wait_steps=0, bursts=0)
_TRAFFIC: Final = serving.Traffic(isl=100, osl=101)


def _step_s(
    *,
    decode_sequences: float,
    kv_tokens: float,
    prompt_tokens: float = 0,
    prompt_pairs: float | None = None,
    prompt_sequences: float | None = None,
) -> float:
    """10 ms to decode whatever the batch, and 40 ms a prompt."""
    return (0.01 if decode_sequences else 0.0) + 0.04 * (prompt_sequences or 0)


def _closed() -> tuple[Line, ...]:
    limit, _ = serving.running_limit(
        traffic=serving.Traffic(isl=1000, osl=1000), scheduling=_PLAIN, kv_pool_tokens=100_000
    )
    four = serving.closed_loop(step_s=_step_s, traffic=_TRAFFIC, scheduling=_PLAIN, users=4)
    return (
        Line("steps of 10 ms, prompts of 40 ms, 4 users, 101 tokens out: TPOT", four.tpot_s or 0.0, "s"),
        Line("served", four.request_per_s, "requests/s"),
        Line(
            "a request's whole time: 127 steps of 16 ms, 8 others with prompts of 50 ms",
            queueing.cycle_s(ttft_s=0.06, prefill_s=0.05, decode_step_s=0.016, decode_steps=127, users=8),
            "s",
        ),
        Line(
            "64 users, 32 slots of 50 s: each waits",
            queueing.waiting_users_s(users=64, slots=32, residence_s=50),
            "s",
        ),
        Line(
            "30 users, answers of 2 s, 4 s of thinking: waiting for an answer",
            queueing.requesting_users(users=30, time_in_system_s=2, think_s=4),
            "1",
        ),
        Line("a KV pool of 100,000 tokens holds requests of 1,000 in and out", limit, "1"),
        Line("query-key pairs of a prompt of 1,000", queueing.prompt_pairs(new_tokens=1000), "1"),
    )


def _open() -> tuple[Line, ...]:
    five = serving.open_loop(step_s=_step_s, traffic=_TRAFFIC, scheduling=_PLAIN, request_per_s=5)
    return (
        Line("5 requests/s on steps of 10 ms and prompts of 40 ms: TPOT", five.tpot_s or 0.0, "s"),
        Line("utilisation", five.utilization, "1"),
        Line("the most that is stable", five.stable_request_per_s, "requests/s"),
        Line(
            "wait for one of 10 slots of 10 s at 90 %",
            queueing.waiting_open_s(utilization=0.9, slots=10, residence_s=10),
            "s",
        ),
        Line("at 99 %", queueing.waiting_open_s(utilization=0.99, slots=10, residence_s=10), "s"),
        Line(
            "wait for earlier prompts of 0.1 s at 4 requests/s",
            queueing.waiting_prompts_s(request_per_s=4, prefill_s=0.1),
            "s",
        ),
    )


def _bursts() -> tuple[Line, ...]:
    all_at_once = serving.burst(step_s=_step_s, traffic=_TRAFFIC, scheduling=_PLAIN, requests=512)
    drain = queueing.draining_steps(requests=1000, mean_steps=200, variation=1.0)
    together = serving.static_batch(step_s=_step_s, traffic=_TRAFFIC, scheduling=_PLAIN, batch=8)
    return (
        Line(
            "64 prompts at once, 8 a step of 0.48 s: mean TTFT",
            queueing.burst_ttft_s(requests=64, together=8, chunk_s=0.48),
            "s",
        ),
        Line(
            "the longest of 1,000 answers of 200 steps on average", sum(steps for _, steps in drain), "step"
        ),
        Line(
            "a stall before the second token, of answers of 200: mean of TPOT over TPOT of the means",
            queueing.mean_of_ratios(steps=1, mean_steps=200, variation=1.0),
            "1",
        ),
        Line("512 requests at once, 256 slots: tokens out", all_at_once.output_token_per_s, "token/s"),
        Line("one static batch of 8, from start to end", together.e2e_s, "s"),
    )


def _goodput() -> tuple[Line, ...]:
    return (
        Line(
            "TTFT of 0.1 s at least and 0.3 s on average: within 0.5 s",
            queueing.within_slo(mean_s=0.3, least_s=0.1, limit_s=0.5),
            "1",
        ),
        Line("within 0.2 s", queueing.within_slo(mean_s=0.3, least_s=0.1, limit_s=0.2), "1"),
    )


_COMMAND: Final = "capplan latency --model 8b --gpu h100 --concurrency 32"
SERVING: Final[tuple[Topic, ...]] = (
    topic(
        "closed-loop",
        "N users, each with one request at a time",
        (
            serving.closed_loop,
            queueing.cycle_s,
            queueing.waiting_users_s,
            queueing.requesting_users,
            serving.running_limit,
            queueing.prompt_pairs,
        ),
        _closed,
        aliases=("concurrency", "interference", "chunked-prefill"),
        command=_COMMAND,
    ),
    topic(
        "open-loop",
        "Requests that come at their own rate, and the knee",
        (serving.open_loop, queueing.waiting_open_s, queueing.waiting_prompts_s),
        _open,
        aliases=("poisson", "request-rate", "knee", "stable-rate", "utilisation"),
        command="capplan latency --model 8b --gpu h100 --request-rate 8",
    ),
    topic(
        "burst",
        "Everything at once: bursts and batches",
        (
            serving.burst,
            queueing.burst_ttft_s,
            queueing.draining_steps,
            queueing.mean_of_ratios,
            serving.static_batch,
        ),
        _bursts,
        aliases=("start-burst", "offline-batch"),
        command="capplan latency --model 8b --gpu h100 --requests 1000",
    ),
    topic(
        "goodput",
        "Requests within their limits",
        (queueing.within_slo,),
        _goodput,
        command="capplan latency --model 8b --gpu h100 --concurrency 32 --slo chat",
    ),
)
