"""One engine in a steady state: a request's rounds of prompt and decode steps beside the others'.

A request prefills `isl` tokens in chunks, then decodes; d is a step that only decodes, p what a prompt adds.
Every case is closed form inside a short fixed point over the mean number of sequences that decode (batch).
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Protocol

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
    tokenisation, detokenisation, where many requests are under way; of a lone one `alone_s`. New requests are
    looked for every `poll_steps` steps. In a closed loop a request comes as a step ends, and waits for
    `wait_steps` of the next; the start, all users at once, counts for `bursts` rounds of requests. Of users
    with equal requests `together` stay in one step, where prompts ride in decode steps. `tokens_per_step` is
    above 1 with speculative decoding.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_first: bool = False
    reserved: float = 0.5
    first_token_s: float = 0.0
    alone_s: float = math.inf
    poll_steps: float = 1.0
    wait_steps: float = 1.0
    bursts: float = 1.0
    together: float = 2.0
    tokens_per_step: float = 1.0

    def around_s(self, running: float) -> float:
        """Time around the engine of one of `running` requests: min(first_token, running · alone)."""
        return min(self.first_token_s, max(1.0, running) * self.alone_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests: tokens in and out, and how they come.

    `cached` of the prompt's tokens need no prefill. `variation`: the standard deviation of output lengths
    over their mean, 1 in conversations; `equal` makes it 0: all requests have the same lengths, so that users
    move in step. `requests_per_user` is how long a closed loop runs: its start, with all users at once,
    counts 1 / requests_per_user.
    """

    isl: float
    osl: float
    cached: float = 0.0
    equal: bool = False
    variation: float = 1.0
    requests_per_user: float = 10.0
    network_s: float = 0.0

    @property
    def new_tokens(self) -> float:
        """Prompt tokens to prefill."""
        return max(1.0, self.isl - self.cached)

    @property
    def held_tokens(self) -> float:
        """KV tokens of a request met while it decodes: long ones are met more often.

        isl + osl · (1 + v²) / 2        (v = 0 of equal lengths; the mean age of a renewal)
        """
        variation = 0.0 if self.equal else self.variation
        return self.isl + self.osl * (1 + variation**2) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A steady state at some number of requests under way."""

    residence_s: float
    tpot_s: float
    start_s: float
    wait_s: float
    own_s: float
    batch: float
    decode_step_s: float
    prompt_s: float


class Engine:
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

    def closed(self, running: float) -> Point:
        """The steady state with `running` requests always under way."""
        plan, batch, passing = self.plan, running, 0.0
        share, last = min(1.0, plan.bursts / self.traffic.requests_per_user), 0.0
        for _ in range(ROUNDS):
            prompt, through = self.prompts(batch, self.together(running, passing))
            decode = self.decode_s(batch)
            wait = self._wait(running, passing, prompt, through, decode)
            inside = through + wait
            if not self.decode_steps:
                # Nothing decodes, no step is under way but prompts': they are worked off one after another.
                inside = max(through, running * prompt)
                wait = inside - through
            # Every prompt needs room in some step, whether anything decodes in it or not.
            steps = max(self.decode_steps, running * self.traffic.new_tokens / self.room(batch))
            cycle = inside
            if self.decode_steps:
                cycle = self._cycle(running, inside, prompt, decode, steps)
            decoding = cycle - inside
            if not plan.prefill_first and self.decode_steps:
                # A request that decodes is in every step; what is beyond that it waited to be let in.
                decoding *= self.decode_steps / steps
                wait += cycle - inside - decoding
            # At the start all prompts stand before the first answer: what they wait more, they stall less.
            start = share * max(0.0, self.start_s(running) - wait - through)
            start = min(start, decoding - self.decode_steps * decode) if self.decode_steps else start
            residence = cycle + plan.around_s(running)
            passing = max(0.0, running - 1) / residence * (cycle - inside) / steps
            batch = self._batch(running, decoding, residence, steps)
            if abs(residence - last) < TOLERANCE * residence:
                break
            last = residence
        start = max(0.0, start)
        decoding -= start if self.decode_steps else 0.0
        return Point(
            residence_s=residence,
            tpot_s=decoding / self.decode_steps / plan.tokens_per_step if self.decode_steps else 0.0,
            start_s=start,
            wait_s=wait,
            own_s=through,
            batch=batch,
            decode_step_s=decode,
            prompt_s=prompt,
        )

    def _batch(self, running: float, decoding: float, residence: float, steps: float) -> float:
        """Sequences that decode in the mean step; where prompts go first, none decode meanwhile."""
        if not self.plan.prefill_first or not self.decode_steps:
            return running * decoding / residence
        missed = self.plan.wait_steps + (self.plan.poll_steps - 1) / 2
        return running * steps / (steps + (missed if running > 1 else 0.0))

    def _cycle(self, running: float, inside: float, prompt: float, decode: float, steps: float) -> float:
        """Time of a request in the engine.

        prompts first: every step is someone's prompt or everyone's decoding,  T = N · p + K · d + looks
        prompts in decode steps: queueing.cycle_s; its own prompt is in its TTFT, not in its decoding
        """
        if self.plan.prefill_first:
            looks = (self.plan.poll_steps - 1) / 2 * decode if running > 1 else 0.0
            return max(inside + steps * decode, running * prompt + steps * decode + looks)
        cycle = queueing.cycle_s(
            ttft_s=inside,
            prefill_s=prompt,
            decode_step_s=decode,
            decode_steps=steps,
            users=max(0.0, running - 1),
        )
        return max(cycle, running * prompt)

    def together(self, running: float, passing: float) -> float:
        """Prompts that are found at one look, this one included; `passing` come in the mean step.

        Prompts first: counted in decode steps, a user's requests come at sums of output lengths, which r
        rounds spread over v · osl · √(3 r) steps; N − 1 others fall into the steps between two looks.
        """
        others = max(0.0, running - 1)
        if not self.decode_steps:
            # Nothing but prompts: those that wait share the next steps.
            return 1 + others
        if not self.plan.prefill_first:
            if self.traffic.equal:
                return min(1 + others, max(1.0, self.plan.together))
            return 1 + passing * self.plan.poll_steps
        if self.traffic.equal:
            return 1 + others
        rounds = math.sqrt(3 * self.traffic.requests_per_user)
        spread = self.decode_steps * min(1.0, self.traffic.variation * rounds)
        return 1 + others * min(1.0, self.plan.poll_steps / (spread + self.plan.poll_steps))

    def _wait(self, running: float, passing: float, prompt: float, through: float, decode: float) -> float:
        """Waiting for the step under way, and for prompts found at the same look."""
        plan, others = self.plan, max(0.0, running - 1)
        looks = (plan.poll_steps - 1) / 2 * decode * min(1.0, others)
        under_way = plan.wait_steps * min(1.0, others) * decode
        if plan.prefill_first:
            found = self.together(running, passing)
            # Users who move in step leave nothing under way.
            under_way *= 1 - (found - 1) / max(1.0, others)
            return looks + under_way + max(0.0, self.wave_s(found, prompt) - through)
        if self.traffic.equal:
            # The next step has the prompts of those who came before, where there are more than one step's.
            groups = running / self.together(running, passing)
            return looks + under_way + plan.wait_steps * (through - decode) * min(1.0, max(0.0, groups - 1))
        return looks + under_way + plan.wait_steps * passing * prompt

    def open(self, request_per_s: float, most: float) -> Point:
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
            held = min(most, request_per_s * (self.traffic.osl - 1) * tpot)
            residence = plan.around_s(batch) + wait + through + (self.traffic.osl - 1) * tpot
            batch = (batch + held) / 2
            if abs(held - batch) < TOLERANCE * batch and abs(residence - last) < TOLERANCE * residence:
                break
            last = residence
        return Point(
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

    def tail_s(self, running: float, requests: float) -> float:
        """What the last of `requests` take longer than at full batch, with ever fewer beside them.

        equal lengths: R = q · n + rest, and the rest decodes by itself:  K · (d(rest) − rest / n · d(n))
        else:  ∫ d(n · S(x)) dx − K · d(n),   S the share of outputs longer than x steps, to the longest of n
        """
        full = self.decode_s(running)
        if self.traffic.equal:
            rest = requests % running
            return self.decode_steps * (self.decode_s(rest) - rest / running * full) if rest >= 1 else 0.0
        steps = queueing.draining_steps(
            requests=running, mean_steps=self.decode_steps, variation=self.traffic.variation
        )
        drained = sum(count * self.decode_s(batch) for batch, count in steps)
        return max(0.0, drained - self.decode_steps * full)

    def stable_request_per_s(self, most: float) -> float:
        """The most requests a second: `most` under way all the time, at a random moment each."""
        own_variation = 0.0 if self.traffic.equal else self.traffic.variation
        traffic = replace(self.traffic, equal=False, variation=own_variation, requests_per_user=math.inf)
        own = Engine(self.step_s, traffic, replace(self.plan, wait_steps=0.5))
        return most / own.closed(most).residence_s
