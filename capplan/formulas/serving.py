"""From the time of one step to what users see: TTFT, TPOT and throughput of an engine under a load.

A request prefills `isl` tokens in chunks, then decodes; d is a step that only decodes, p what a prompt adds.
Every case is closed form inside a short fixed point over the mean number of sequences that decode (batch).
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from capplan.formulas import queueing

ROUNDS: Final = 12
TOLERANCE: Final = 1e-3
"""The fixed point ends after so many rounds, or where a round changes it less: four or five of them."""


class StepSeconds(Protocol):
    """Seconds of one engine step, as StepTable.step_s."""

    def __call__(
        self,
        *,
        decode_sequences: float,
        kv_tokens: float,
        prompt_tokens: float = 0,
        prompt_pairs: float | None = None,
        prompt_sequences: float | None = None,
    ) -> float:
        """Time of a step of these sequences and prompts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How an engine builds its steps; times in seconds.

    `prefill_first`: prompts stall decoding; else chunks ride in decode steps. `reserved` is the share of a
    request's output that must fit before it starts. `first_token_s` lies around the engine: HTTP,
    tokenisation, detokenisation. New requests are looked for every `poll_steps` steps. In a closed loop users
    come in groups: a new request waits for `wait_steps` steps with prompts, and the start's burst lasts for
    `bursts` waves. `tokens_per_step` is above 1 with speculative decoding.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_first: bool = False
    reserved: float = 0.5
    first_token_s: float = 0.0
    poll_steps: float = 1.0
    wait_steps: float = 0.5
    bursts: float = 1.0
    tokens_per_step: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests: tokens in and out, and how they come.

    `cached` of the prompt's tokens need no prefill. `equal`: every request has the same lengths, so that
    users move in step. `requests_per_user` is how long a closed loop runs: its start, with all users at once,
    counts 1 / requests_per_user.
    """

    isl: float
    osl: float
    cached: float = 0.0
    equal: bool = False
    requests_per_user: float = 10.0
    network_s: float = 0.0

    @property
    def new_tokens(self) -> float:
        """Prompt tokens to prefill."""
        return max(1.0, self.isl - self.cached)

    @property
    def held_tokens(self) -> float:
        """KV tokens of a decoding request, on average over its life."""
        return self.isl + self.osl / 2


Limit = Literal["users", "max_num_seqs", "kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What users see, in seconds and tokens per second of the whole replica.

    TTFT = `around_s` (network, HTTP, tokenisation) + `queue_s` (for a slot) + `start_s` (a share of the
    start's burst) + `wait_s` (for the step under way, and prompts before) + `prefill_s`. `batch` decode in
    the mean step, `running` requests are under way; `limit` says what bounds them. `decode_step_s` is a step
    without prompts, `prompt_s` what a prompt adds, `prefill_share` the part of the time that prompts take.
    `stable_request_per_s` is the most that can be served; `utilization` the load over it (above 1: no steady
    state, and the latencies are infinite).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A steady state at some number of requests under way."""

    residence_s: float
    tpot_s: float
    start_s: float
    wait_s: float
    own_s: float
    batch: float
    decode_step_s: float
    prompt_s: float


def running_limit(
    *, traffic: Traffic, scheduling: Scheduling, kv_pool_tokens: float | None
) -> tuple[float, Limit]:
    """Requests under way at most, and what bounds them.

        min(max_num_seqs, pool / (isl + reserved · osl))

    Holds for: requests of like lengths, blocks taken as they are needed. Source: the engines' schedulers.
    Example: 256 sequences, a pool of 100,000 tokens, isl 1,000, osl 1,000, half reserved: 66.7, by KV.
    """
    if kv_pool_tokens is None:
        return float(scheduling.max_num_seqs), "max_num_seqs"
    held = traffic.isl + max(scheduling.reserved, 0.5) * traffic.osl
    by_kv = max(1.0, kv_pool_tokens / held)
    if by_kv < scheduling.max_num_seqs:
        return by_kv, "kv"
    return float(scheduling.max_num_seqs), "max_num_seqs"


class _Engine:
    """One step function under one traffic and schedule."""

    def __init__(self, step_s: StepSeconds, traffic: Traffic, scheduling: Scheduling) -> None:
        self.step_s, self.traffic, self.plan = step_s, traffic, scheduling
        self.decode_steps = max(0.0, traffic.osl - 1) / scheduling.tokens_per_step

    def decode_s(self, batch: float) -> float:
        """d: a step of `batch` decoding sequences, one at least."""
        batch = max(1.0, batch)
        return self.step_s(decode_sequences=batch, kv_tokens=batch * self.traffic.held_tokens)

    def room(self, batch: float) -> float:
        """Prompt tokens that a step beside `batch` decoding sequences has room for."""
        return max(1.0, self.plan.max_num_batched_tokens - batch)

    def prompts(self, batch: float, together: float) -> tuple[float, float]:
        """p: what one prompt adds to the engine's time; and the time until `together` of them are through.

        whole step with m prompts, m = min(together, room / new):  p = (whole − d) / m
        longer than the room: n = new / room chunks, p = n · (whole − d), through after n steps
        """
        beside = 0.0 if self.plan.prefill_first else batch
        new, past = self.traffic.new_tokens, self.traffic.cached
        room = self.room(beside)
        chunks = max(1.0, new / room)
        count = max(1.0, min(together, room / new))
        whole = self.step_s(
            decode_sequences=beside,
            kv_tokens=beside * self.traffic.held_tokens,
            prompt_tokens=count * new / chunks,
            prompt_pairs=count * queueing.prompt_pairs(new_tokens=new, past_tokens=past) / chunks,
            prompt_sequences=count,
        )
        alone = self.decode_s(beside) if beside else 0.0
        return chunks * max(0.0, whole - alone) / count, chunks * whole

    def closed(self, running: float) -> _Point:
        """The steady state with `running` requests always under way."""
        plan, batch, passing = self.plan, running, 0.0
        share, last = min(1.0, plan.bursts / self.traffic.requests_per_user), 0.0
        for _ in range(ROUNDS):
            prompt, through = self.prompts(batch, 1 + passing * plan.poll_steps)
            decode = self.decode_s(batch)
            wait = self._wait(running, prompt, through, decode)
            start = share * max(0.0, self.start_s(running) - wait - through)
            inside = through + wait + start
            if not self.decode_steps:
                # Nothing decodes: the users' prompts are worked off one after another.
                inside = max(inside, running * prompt)
                wait = inside - through - start
            # Every prompt needs room in some step, whether anything decodes in it or not.
            steps = max(self.decode_steps, running * self.traffic.new_tokens / self.room(batch))
            cycle = inside
            if self.decode_steps:
                # Its own prompt is in its TTFT, not in its decoding.
                cycle = queueing.cycle_s(
                    ttft_s=inside,
                    prefill_s=prompt,
                    decode_step_s=decode,
                    decode_steps=steps,
                    users=max(0.0, running - 1),
                )
                cycle = max(cycle, running * prompt)
            decoding = cycle - inside
            if not plan.prefill_first and self.decode_steps:
                # A request that decodes is in every step; what is beyond that it waited to be let in.
                decoding *= self.decode_steps / steps
                wait += cycle - inside - decoding
            residence = cycle + plan.first_token_s
            passing = running / residence * (cycle - inside) / steps
            batch = running * decoding / residence
            if abs(residence - last) < TOLERANCE * residence:
                break
            last = residence
        return _Point(
            residence_s=residence,
            tpot_s=decoding / self.decode_steps / plan.tokens_per_step if self.decode_steps else 0.0,
            start_s=start,
            wait_s=wait,
            own_s=through,
            batch=batch,
            decode_step_s=decode,
            prompt_s=prompt,
        )

    def _wait(self, running: float, prompt: float, through: float, decode: float) -> float:
        """Waiting for the step under way, and for the prompts of users who move in step with this one."""
        if self.traffic.equal and self.plan.prefill_first:
            # All users finish, and so come back, together.
            return max(0.0, self.wave_s(running, prompt) - through)
        return self.plan.wait_steps * through + (self.plan.poll_steps - 1) / 2 * decode

    def open(self, request_per_s: float) -> _Point:
        """The steady state under Poisson arrivals, while the engine keeps up."""
        plan, batch, tpot = self.plan, 1.0, self.decode_s(1.0)
        last = 0.0
        for _ in range(4 * ROUNDS):
            passing = request_per_s * tpot * plan.tokens_per_step
            prompt, through = self.prompts(batch, 1 + passing * plan.poll_steps)
            decode = self.decode_s(batch)
            load = min(0.999, request_per_s * prompt)
            tpot = decode / (1 - load) / plan.tokens_per_step if self.decode_steps else 0.0
            wait = queueing.waiting_prompts_s(request_per_s=request_per_s, prefill_s=load / request_per_s)
            wait += ((1 - load) * decode + load * through) * plan.poll_steps / 2
            held = request_per_s * (self.traffic.osl - 1) * tpot
            residence = plan.first_token_s + wait + through + (self.traffic.osl - 1) * tpot
            batch = (batch + held) / 2
            if abs(held - batch) < TOLERANCE * batch and abs(residence - last) < TOLERANCE * residence:
                break
            last = residence
        return _Point(
            residence_s=residence,
            tpot_s=tpot,
            start_s=0.0,
            wait_s=wait,
            own_s=through,
            batch=batch,
            decode_step_s=decode,
            prompt_s=prompt,
        )

    def wave_s(self, requests: float, prompt: float, beside: float = 0.0) -> float:
        """Mean time to first token of `requests` that all come at once, inside the engine."""
        together = max(1.0, min(requests, self.room(0) / self.traffic.new_tokens))
        return queueing.burst_ttft_s(
            requests=requests,
            together=together,
            chunk_s=together * prompt + beside,
        )

    def start_s(self, requests: float) -> float:
        """Mean time to first token, inside the engine, of `requests` that start together."""
        together = self.room(0) / self.traffic.new_tokens
        if self.plan.prefill_first:
            return self.wave_s(requests, self.prompts(0.0, together)[0])
        half = requests / 2
        return self.wave_s(requests, self.prompts(half, together)[0], self.decode_s(half))

    def stable_request_per_s(self, most: float) -> float:
        """The most requests a second: `most` under way all the time, at a random moment each."""
        traffic = replace(self.traffic, equal=False, requests_per_user=math.inf)
        own = _Engine(self.step_s, traffic, replace(self.plan, wait_steps=0.5))
        return most / own.closed(most).residence_s


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

    Holds for: no think time. Source: Little's law; waits and burst fitted on public runs, serving.yaml.
    Example: 10 ms a decode step and 40 ms a prompt whatever the batch, 4 users, 101
    tokens out, no wait: S = 0.05 s, T = 1.168 s, TPOT = (T − S) / 100 = 11.2 ms, X = 3.4 requests/s.
    """
    engine = _Engine(step_s, traffic, scheduling)
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
    engine = _Engine(step_s, replace(traffic, equal=False), scheduling)
    most, what = running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=kv_pool_tokens)
    stable = engine.stable_request_per_s(most)
    use = request_per_s / stable
    if use >= 1:
        full = engine.closed(most)
        served = _served(
            engine, full, request_per_s=stable, running=most, limit=what, queue_s=math.inf, stable=stable
        )
        return replace(served, utilization=use, steady=False)
    point = engine.open(request_per_s)
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

        W = max(1, R / n) waves of n, T each:  X = R / (W · T);  the mean request waits (W − 1) / 2 · T

    Holds for: R beyond what runs at once, or just as many. Source: Little's law.
    Example: 512 requests, 256 slots, T = 11.6 s: X = 22 requests/s, the mean request waits 5.8 s for a slot.
    """
    most, what = running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=kv_pool_tokens)
    running = min(requests, most)
    waves = requests / running
    engine = _Engine(step_s, replace(traffic, requests_per_user=waves), replace(scheduling, bursts=1.0))
    point = engine.closed(running)
    rate = running / point.residence_s
    served = _served(
        engine,
        point,
        request_per_s=rate,
        running=running,
        limit="users" if requests <= most else what,
        queue_s=(waves - 1) / 2 * point.residence_s,
        stable=rate,
    )
    return replace(served, utilization=1.0)


def static_batch(*, step_s: StepSeconds, traffic: Traffic, scheduling: Scheduling, batch: float) -> Served:
    """One batch from start to end, no server in front; no one joins or leaves.

        e2e = B · p + (osl − 1) · d(B, isl + osl / 2)

    Holds for: equal lengths. Source: serving lesson, "Static Batching".
    Example: 8 prompts of 40 ms, then 100 steps of 10 ms: 0.32 + 1.0 = 1.32 s.
    """
    engine = _Engine(step_s, traffic, replace(scheduling, prefill_first=True, first_token_s=0.0))
    prompt, _ = engine.prompts(0.0, batch)
    decode = engine.decode_s(batch)
    residence = batch * prompt + engine.decode_steps * decode
    point = _Point(
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
    engine: _Engine,
    point: _Point,
    *,
    request_per_s: float,
    running: float,
    limit: Limit,
    stable: float,
    queue_s: float = 0.0,
) -> Served:
    """The terms put together."""
    traffic = engine.traffic
    around = traffic.network_s + engine.plan.first_token_s
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
