"""Waiting and batching: slots that idle, steps that are needed, requests under way.

Every function is keyword-only; a step makes one token for each sequence in the batch.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Final

_EULER: Final = 0.5772


def static_batch_steps(*, output_tokens: Sequence[int], slots: int) -> int:
    """Decode steps of requests served in static batches, in order.

        Σ over batches of max(output tokens)

    Holds for: equal prompts, prefill not counted. Source: serving lesson, "Static Batching".
    Example: 20 and 600 tokens in 2 slots: 600 steps.
    """
    batches = (output_tokens[at : at + slots] for at in range(0, len(output_tokens), slots))
    return sum(max(batch) for batch in batches)


def continuous_batch_steps(*, output_tokens: Sequence[int], slots: int) -> int:
    """Decode steps when a finished request's slot takes the next one at once, in order.

        the last slot to end, each request going to the slot that is free first

    Holds for: equal prompts, prefill not counted. Source: serving lesson, "Iteration-Level Scheduling".
    Example: 20, 600, 20, 600 tokens in 2 slots: 640 steps (static: 1,200).
    """
    ends = [0] * slots
    for tokens in output_tokens:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)


def static_bubble_fraction(*, output_tokens: Sequence[int]) -> float:
    """Share of a static batch's slot-steps that make nothing.

        1 − Σ tokens / (B · max tokens)

    Holds for: one batch, decode only. Source: serving lesson, "The Straggler Effect in Static Batching".
    Example: 20 and 600 tokens: 1 − 620 / 1,200 = 48.3 %.
    """
    return 1 - sum(output_tokens) / (len(output_tokens) * max(output_tokens))


def requests_in_system(*, request_per_s: float, time_in_system_s: float) -> float:
    """Requests under way at once, on average (Little's law).

        L = λ · W

    Holds for: any stable system. Source: Little 1961; serving lesson, "Pending Queue Length".
    Example: 20 requests/s of 10 s each: 200.
    """
    return request_per_s * time_in_system_s


def prompt_pairs(*, new_tokens: float, past_tokens: float = 0) -> float:
    """Query-key pairs of a prompt chunk under the causal mask.

        n · past + n · (n + 1) / 2

    Holds for: full attention. Source: the causal mask of "Attention Is All You Need".
    Example: 4 new tokens after 10: 40 + 10 = 50.
    """
    return new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2


def cycle_s(
    *, ttft_s: float, prefill_s: float, decode_step_s: float, decode_steps: float, users: float
) -> float:
    """Time from one request's arrival to its end while `users` others are always under way, in seconds.

        T = S + K · d / (1 − N · p / T)      (S: to the first token; K steps of d without prompts)

    Each step that a request decodes in also carries N / T prompts a second, which lengthen it by p each. The
    larger root of T² − (S + N·p + K·d) · T + S·N·p = 0.

    Holds for: a closed loop in steady state, prompts mixed into decode steps or stalling them.
    Source: Little's law on the prompts that pass while a request decodes.
    Example: S 0.06 s, 8 others, p 0.05 s, 127 steps of 0.016 s: a = 2.492, T = 2.482 s.
    """
    whole = ttft_s + users * prefill_s + decode_steps * decode_step_s
    return (whole + math.sqrt(max(0.0, whole * whole - 4 * ttft_s * users * prefill_s))) / 2


def burst_ttft_s(*, requests: float, together: float, chunk_s: float) -> float:
    """Mean time to first token of prompts that all arrive at once and are worked off in order, in seconds.

        c · (R / m + 1) / 2          (m prompts a step of c seconds; one step where R ≤ m)

    Holds for: equal prompts; the first of them waits for its own step only. Source: the sum of 1 … R / m.
    Example: 64 prompts, 8 a step of 0.48 s: 0.48 · (8 + 1) / 2 = 2.16 s.
    """
    return chunk_s * (max(1.0, requests / together) + 1) / 2


def waiting_users_s(*, users: float, slots: float, residence_s: float) -> float:
    """Mean wait for a slot in a closed loop of more users than slots, in seconds.

        W = (N − n) / n · T          (n requests under way, each for T)

    Holds for: N ≥ n, no think time. Source: Little's law. Example: 64 users, 32 slots, T = 50 s: 50 s.
    """
    return max(0.0, users - slots) / slots * residence_s


def requesting_users(*, users: float, time_in_system_s: float, think_s: float) -> float:
    """Users of a closed loop who wait for an answer at a time, on average; the others think.

        N · T / (T + Z)

    Holds for: any closed loop in steady state. Source: Little's law on a user's cycle.
    Example: 30 users, answers of 2 s, 4 s of thinking: 10.
    """
    return users * time_in_system_s / (time_in_system_s + think_s)


def waiting_open_s(*, utilization: float, slots: float, residence_s: float, variation: float = 1.0) -> float:
    """Mean wait for one of many slots under Poisson arrivals, in seconds; infinite at utilisation 1.

        W ≈ (1 + cv²) / 2 · T / n · ρ^(√(2(n + 1)) − 1) / (1 − ρ)

    Holds for: heavy to moderate load, within some percent of M/M/n. Source: Sakasegawa 1977.
    Example: ρ = 0.9, 10 slots, T = 10 s, cv² = 1: 1 · 0.9^3.69 / 0.1 = 6.78 s (M/M/10: 6.69 s).
    """
    if utilization >= 1:
        return math.inf
    share: float = utilization ** (math.sqrt(2 * (slots + 1)) - 1)
    return (1 + variation) / 2 * residence_s / slots * share / (1 - utilization)


def waiting_prompts_s(*, request_per_s: float, prefill_s: float, variation: float = 0.0) -> float:
    """Mean wait for earlier prompts where prompts come at random (M/G/1), in seconds; infinite at load 1.

        W = λ · p² · (1 + cv²) / (2 · (1 − λ · p))

    Holds for: Poisson arrivals, prompts worked off one after another. Source: Pollaczek–Khinchine.
    Example: 4 requests/s, p = 0.1 s, all alike: 4 · 0.01 / (2 · 0.6) = 33 ms.
    """
    load = request_per_s * prefill_s
    if load >= 1:
        return math.inf
    return request_per_s * prefill_s**2 * (1 + variation) / (2 * (1 - load))


def draining_steps(
    *, requests: float, mean_steps: float, variation: float, pieces: int = 16
) -> tuple[tuple[float, float], ...]:
    """Steps of `requests` that start together and end one by one: (requests still under way, steps) pieces.

        S(x) = e^(−(x / λ)^k);  to the longest of n, x = λ · (ln n + 0.577)^(1 / k);  λ = mean / Γ(1 + 1 / k)

    A Weibull law of k ≈ cv^−1.086: exponential at cv = 1, equal at 0.
    Holds for: cv from 0.05 to 2. Source: the largest of n values (Gumbel); k by Justus 1978.
    Example: 1,000 requests of 200 steps on average, cv 1: the last ends after 200 · 7.48 = 1,497 steps.
    """
    if variation < 0.05:
        return ((requests, mean_steps),)
    power = variation**1.086
    scale = mean_steps / math.gamma(1 + power)
    most = math.log(max(1.0, requests)) + _EULER
    made, before = [], 0.0
    for piece in range(pieces):
        end = scale * (most * (piece + 1) / pieces) ** power
        left = requests * math.exp(-most * (piece + 0.5) / pieces)
        made.append((max(1.0, left), end - before))
        before = end
    return tuple(made)


def mean_of_ratios(*, steps: float, mean_steps: float, variation: float) -> float:
    """A time spent in the first `steps` of every answer, over each answer's own length: mean over requests
    as a multiple of total time over total length.

        1 + cv² · (f − 1),   f = (1 − e^−a) / a + E1(a),   a = steps / mean

    Benchmark clients average each request's TPOT, in which short answers count as much as long ones.
    Holds for: lengths spread exponentially (cv 1); nothing to it where all are equal (cv 0).
    Source: the mean of min(1, s / L) over L exponential; E1 by its series.
    Example: a stall before the second token of answers of 200 on average: a = 0.005, f = 0.998 + 4.73 = 5.72.
    """
    share = min(1.0, steps / mean_steps)
    tail = -_EULER - math.log(share) + share - share**2 / 4 + share**3 / 18 - share**4 / 96
    multiple = -math.expm1(-share) / share + tail
    return 1 + variation**2 * (multiple - 1)


def within_slo(*, mean_s: float, least_s: float, limit_s: float) -> float:
    """Share of requests whose latency stays within a limit.

        1 − e^(−(limit − least) / (mean − least)), 0 below the least        (a shifted exponential)

    Holds for: waits that vary about as much as their mean, as those for slots and prompts do.
    Source: the exponential tail of M/M/n waits.
    Example: least 0.1 s, mean 0.3 s, limit 0.5 s: 1 − e^−2 = 86.5 %.
    """
    if limit_s < least_s:
        return 0.0
    spread = mean_s - least_s
    return 1.0 if spread <= 0 else 1 - math.exp(-(limit_s - least_s) / spread)
