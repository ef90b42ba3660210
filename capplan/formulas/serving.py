"""From the time of one step to what users see: TTFT, TPOT and throughput of an engine under a load.

Loads: closed loop, open loop, burst, static batch. The engine's steady state is in steady.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from capplan.formulas import queueing
from capplan.formulas.steady import Engine, Point, Scheduling, StepSeconds, Traffic

__all__ = [
    "Limit",
    "Scheduling",
    "Served",
    "StepSeconds",
    "Traffic",
    "burst",
    "closed_loop",
    "open_loop",
    "running_limit",
    "static_batch",
]

Limit = Literal["users", "max_num_seqs", "kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What users see, in seconds and tokens per second of the whole replica.

    `tpot_s` is the mean over requests, as clients print it. TTFT = `around_s` (network, HTTP, tokenisation) +
    `queue_s` (for a slot) + `start_s` (a share of the start's burst) + `wait_s` (for the step under way, and
    prompts before) + `prefill_s`. `batch` decode in the mean step, `running` requests are under way; `limit`
    says what bounds them. `decode_step_s` is a step without prompts, `prompt_s` what a prompt adds,
    `prefill_share` the part of the time that prompts take. `stable_request_per_s` is the most that can be
    served; `utilization` the load over it (above 1: no steady state, and the latencies are infinite).
    """

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    request_per_s: float
    output_token_per_s: float
    total_token_per_s: float
    batch: float
    running: float
    limit: Limit
    around_s: float
    queue_s: float
    start_s: float
    wait_s: float
    prefill_s: float
    decode_step_s: float
    prompt_s: float
    prefill_share: float
    utilization: float
    stable_request_per_s: float
    steady: bool = True

    def goodput_request_per_s(self, *, ttft_s: float, tpot_s: float) -> float:
        """Requests per second that meet both limits; TTFT spreads (queueing.within_slo), TPOT hardly does."""
        if not self.steady or (self.tpot_s is not None and self.tpot_s > tpot_s):
            return 0.0
        least = self.around_s + self.prefill_s
        return self.request_per_s * queueing.within_slo(mean_s=self.ttft_s, least_s=least, limit_s=ttft_s)


def running_limit(
    *, traffic: Traffic, scheduling: Scheduling, kv_pool_tokens: float | None
) -> tuple[float, Limit]:
    """Requests under way at most, and what bounds them.

        min(max_num_seqs, pool / max(held, isl + reserved · osl)),   one request at least

    Holds for: requests of like lengths, blocks taken as they are needed. Source: the engines' schedulers.
    Example: 256 sequences, a pool of 100,000 tokens, all isl 1,000 and osl 1,000, half reserved: 66.7, by KV.
    """
    if kv_pool_tokens is None:
        return float(scheduling.max_num_seqs), "max_num_seqs"
    held = max(traffic.held_tokens, traffic.isl + scheduling.reserved * traffic.osl)
    by_kv = max(1.0, kv_pool_tokens / held)
    if by_kv < scheduling.max_num_seqs:
        return by_kv, "kv"
    return float(scheduling.max_num_seqs), "max_num_seqs"


def closed_loop(
    *,
    step_s: StepSeconds,
    traffic: Traffic,
    scheduling: Scheduling,
    users: float,
    kv_pool_tokens: float | None = None,
) -> Served:
    """N users, each sending its next request as soon as the last is answered, all starting at once.

        n = min(N, running_limit);  T = queueing.cycle_s;  X = n / T;  the others wait (N − n) / n · T
        TTFT = around + wait + prefill + queue + b / r · (start − steady)     (r requests a user, b = bursts)

    Holds for: no think time. Source: Little's law, and what steps a new request meets (tests: a simulation).
    Example: 10 ms a decode step and 40 ms a prompt whatever the batch, 4 users, 101
    tokens out, no wait: S = 0.05 s, T = 1.165 s, TPOT = (T − S) / 100 = 11.1 ms, X = 3.4 requests/s.
    """
    engine = Engine(step_s, traffic, scheduling)
    most, what = running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=kv_pool_tokens)
    running = min(users, most)
    point = engine.closed(running)
    rate = running / point.residence_s
    return _served(
        engine,
        point,
        request_per_s=rate,
        running=running,
        limit="users" if users <= most else what,
        queue_s=queueing.waiting_users_s(users=users, slots=running, residence_s=point.residence_s),
        stable=engine.stable_request_per_s(most) if running < most else rate,
    )


def open_loop(
    *,
    step_s: StepSeconds,
    traffic: Traffic,
    scheduling: Scheduling,
    request_per_s: float,
    kv_pool_tokens: float | None = None,
) -> Served:
    """Poisson arrivals at a rate that does not react to the wait.

        B = λ · osl · TPOT;  TPOT = d(B) / (1 − λ · p);  waits: M/G/1 for prompts, M/M/n for slots

    Above the stable rate there is no steady state: `steady` is False, TTFT and E2E are infinite, TPOT and
    throughput are those of the full engine.

    Holds for: prompts that ride in decode steps or stall them. Source: Pollaczek–Khinchine, Sakasegawa 1977.
    Example: 5 requests/s on steps of 10 ms and prompts of 40 ms: λ · p = 0.2, TPOT = 10 / 0.8 = 12.5 ms.
    """
    variation = 0.0 if traffic.equal else traffic.variation
    engine = Engine(step_s, replace(traffic, equal=False, variation=variation), scheduling)
    most, what = running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=kv_pool_tokens)
    stable = engine.stable_request_per_s(most)
    use = request_per_s / stable
    if use >= 1:
        full = engine.closed(most)
        served = _served(
            engine, full, request_per_s=stable, running=most, limit=what, queue_s=math.inf, stable=stable
        )
        return replace(served, utilization=use, steady=False)
    point = engine.open(request_per_s, most)
    queue = queueing.waiting_open_s(utilization=use, slots=most, residence_s=point.residence_s)
    return _served(
        engine,
        point,
        request_per_s=request_per_s,
        running=min(most, request_per_s * point.residence_s),
        limit="users" if queue < point.own_s else what,
        queue_s=queue,
        stable=stable,
    )


def burst(
    *,
    step_s: StepSeconds,
    traffic: Traffic,
    scheduling: Scheduling,
    requests: float,
    kv_pool_tokens: float | None = None,
) -> Served:
    """`requests` that all come at once and are worked off: an offline batch, or a rate of infinity.

        W = max(1, R / n) waves of n, T each, and what the last ones take longer with fewer beside them:
        X = R / (W · T + tail);  the mean request waits (W − 1) / 2 · T, or as slots come free one by one
        where lengths vary, (1 − 1 / W) · (W − 1) / 2 · T

    Holds for: R beyond what runs at once, or just as many. Source: Little's law.
    Example: 512 equal requests, 256 slots, T = 11.6 s: X = 22 requests/s, the mean one waits 5.8 s.
    """
    most, what = running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=kv_pool_tokens)
    running = min(requests, most)
    waves = requests / running
    engine = Engine(step_s, replace(traffic, requests_per_user=waves), replace(scheduling, bursts=1.0))
    point = engine.closed(running)
    steady = running / point.residence_s
    queue = (waves - 1) / 2 * point.residence_s
    if not traffic.equal:
        queue *= 1 - 1 / waves
    if math.isfinite(requests):
        rate = requests / (waves * point.residence_s + engine.tail_s(running, requests))
    else:
        rate = steady
    served = _served(
        engine,
        point,
        request_per_s=rate,
        running=running,
        limit="users" if requests <= most else what,
        queue_s=queue,
        stable=steady,
    )
    return replace(served, tpot_s=_over_requests_s(engine, point, served, waves), utilization=1.0)


def _over_requests_s(engine: Engine, point: Point, served: Served, waves: float) -> float | None:
    """TPOT as clients average it: the first wave decodes while the start's other prompts are worked off."""
    if served.tpot_s is None or engine.traffic.equal or not engine.decode_steps:
        return served.tpot_s
    ramp = 1.0
    if not engine.plan.prefill_first:
        ramp = max(ramp, served.running * engine.traffic.new_tokens / engine.room(point.batch) / 2)
    stall = served.running * point.prompt_s / 2 / engine.decode_steps / engine.plan.tokens_per_step
    more = queueing.mean_of_ratios(
        steps=ramp, mean_steps=engine.decode_steps, variation=engine.traffic.variation
    )
    return served.tpot_s + stall * (more - 1) / waves


def static_batch(*, step_s: StepSeconds, traffic: Traffic, scheduling: Scheduling, batch: float) -> Served:
    """One batch from start to end, no server in front; no one joins or leaves.

        e2e = B · p + (osl − 1) · d(B, isl + osl / 2)

    Holds for: equal lengths. Source: serving lesson, "Static Batching".
    Example: 8 prompts of 40 ms, then 100 steps of 10 ms: 0.32 + 1.0 = 1.32 s.
    """
    engine = Engine(step_s, traffic, replace(scheduling, prefill_first=True, first_token_s=0.0))
    prompt, _ = engine.prompts(0.0, batch)
    decode = engine.decode_s(batch)
    residence = batch * prompt + engine.decode_steps * decode
    point = Point(
        residence_s=residence,
        tpot_s=decode / scheduling.tokens_per_step if engine.decode_steps else 0.0,
        start_s=0.0,
        wait_s=0.0,
        own_s=batch * prompt,
        batch=batch,
        decode_step_s=decode,
        prompt_s=prompt,
    )
    rate = batch / residence
    return _served(engine, point, request_per_s=rate, running=batch, limit="users", stable=rate)


def _served(
    engine: Engine,
    point: Point,
    *,
    request_per_s: float,
    running: float,
    limit: Limit,
    stable: float,
    queue_s: float = 0.0,
) -> Served:
    """The terms put together."""
    traffic = engine.traffic
    around = traffic.network_s + engine.plan.around_s(running)
    ttft = around + queue_s + point.start_s + point.wait_s + point.own_s
    tpot = point.tpot_s if traffic.osl > 1 else None
    return Served(
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=ttft + (traffic.osl - 1) * (tpot or 0.0),
        request_per_s=request_per_s,
        output_token_per_s=request_per_s * traffic.osl,
        total_token_per_s=request_per_s * (traffic.isl + traffic.osl),
        batch=point.batch,
        running=running,
        limit=limit,
        around_s=around,
        queue_s=queue_s,
        start_s=point.start_s,
        wait_s=point.wait_s,
        prefill_s=point.own_s,
        decode_step_s=point.decode_step_s,
        prompt_s=point.prompt_s,
        prefill_share=min(1.0, request_per_s * point.prompt_s),
        utilization=min(1.0, request_per_s / stable),
        stable_request_per_s=stable,
    )
