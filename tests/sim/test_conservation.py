"""Nothing is lost or made up on the way through replica, vLLM's scheduler and the recorder.

Random workloads and engine limits; the laws are checked after every step, on requests one by one.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.sim import simulator
from capplan.sim.metrics import REQUEST_COLUMNS, Metrics
from capplan.sim.replay import LinearTimes
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import NOT_YET, Request
from capplan.sim.schedulers.vllm_v1 import vllm_v1
from tests.sim.scheduling import Listed

TIMES = LinearTimes(base=100, prompt_token=3, decode_sequence=2, context_token=0.1)
BLOCK = 4

ROWS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 60, 900, 20_000]),
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=16,
)
"""Of a request: the time since the one before, prompt, output, priority, and whether its prompt is shared."""
LIMITS = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 80),
    kv_blocks=st.integers(10, 80),
    block_size=st.just(BLOCK),
    max_model_len=st.sampled_from([None, 64, 90]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 5]),
    prefix_caching=st.booleans(),
    reserve_full=st.booleans(),
    spare_blocks=st.sampled_from([0, 0, 2]),
    policy=st.just("fcfs"),
)


def coming(rows: list[tuple[int, int, int, int, bool]], samples: int = 1) -> list[Request]:
    """The requests of some rows; those that share begin with the same 12 tokens."""
    at, made = 0, []
    for index, (gap, prompt, output, priority, shares) in enumerate(rows):
        at += gap
        made.append(
            Request(
                index,
                at,
                prompt,
                output,
                samples=samples,
                priority=priority,
                segments=(("system", min(12, prompt)),) if shares else (),
                output_key=("answer", index) if shares else None,
            )
        )
    return made


@dataclass
class Ledger:
    """A recorder that checks every step against the requests themselves, and passes it on."""

    requests: list[Request]
    metrics: Metrics
    finished: int = 0
    refused: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    preempted: int = 0
    idle: bool = True
    admitted: list[int] = field(default_factory=list)

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        limits = replica.limits
        # The clock, and work that is never left lying.
        works = bool(step.decoding or step.chunks)
        assert self.end_s <= start_s <= end_s
        assert works == (start_s < end_s)
        assert works or step.preempted
        assert self.idle or start_s == self.end_s
        self.idle = not (replica.running or replica.waiting)
        self.end_s, self.busy_s = end_s, self.busy_s + end_s - start_s
        # Requests.
        self.finished += len(done)
        arrived = sum(request.arrival_s <= start_s for request in self.requests)
        assert arrived == self.finished + self.refused + len(replica.running) + len(replica.waiting)
        assert not set(replica.running) & set(replica.waiting)
        # The step's limits.
        assert works <= step.decoding + step.prompt_tokens <= limits.max_num_batched_tokens
        assert replica.sequences <= limits.max_num_seqs
        assert count == 1 or not (step.chunks or step.preempted or step.held_back)
        new = [request for request, _, _ in step.chunks if request.first_scheduled_s == start_s]
        assert not (step.preempted and (new or step.resumed))
        self.admitted += [request.index for request in new]
        self.tokens += count * step.decoding + step.prompt_tokens
        self.prompt_tokens += step.prompt_tokens
        self.preempted += len(step.preempted)
        self._blocks(replica, step, done)
        for request in done:
            assert request.done_s == end_s
            assert request.made_tokens == request.output_tokens
            assert request.computed_tokens == request.prompt_tokens + request.output_tokens - 1
        self.metrics.steps(replica, step, count, start_s, end_s, done)

    def _blocks(self, replica: Replica, step: Step, done: list[Request]) -> None:
        """Blocks in use are those of the running requests, request by request."""
        blocks, contexts = replica.blocks, [replica.context(request) for request in replica.running]
        assert blocks.used + blocks.free == blocks.total
        assert 0 <= blocks.used <= step.kv_blocks <= blocks.total
        assert 0 <= sum(contexts) <= blocks.total * BLOCK or replica.limits.prefix_caching
        if any(request.samples > 1 for request in self.requests):
            return
        own = sum(blocks.blocks_for(tokens) for tokens in contexts)
        if replica.limits.prefix_caching:
            assert blocks.used <= own
        else:
            assert blocks.used == own
            gone = sum(blocks.blocks_for(request.computed_tokens) for request in done)
            assert step.kv_blocks == own + gone

    def rejected(self, request: Request, now_s: float) -> None:
        self.refused += 1
        self.metrics.rejected(request, now_s)


def served(requests: list[Request], limits: Limits) -> Ledger:
    """A whole run under the ledger's eyes."""
    metrics = Metrics(slots=limits.max_num_seqs, kv_blocks=limits.kv_blocks, block_size=BLOCK)
    ledger = Ledger(requests, metrics)
    replica = Replica(limits)
    simulator.run(workload=Listed(requests), replica=replica, scheduler=vllm_v1, times=TIMES, recorder=ledger)
    metrics.close()
    assert not replica.running
    assert not replica.waiting
    assert replica.blocks.used == replica.sequences == replica.decoding == replica.kv_tokens == 0
    return ledger


@given(rows=ROWS, limits=LIMITS, samples=st.sampled_from([1, 1, 1, 3]))
@settings(max_examples=100, deadline=None)
def test_every_step_keeps_the_books(
    rows: list[tuple[int, int, int, int, bool]], limits: Limits, samples: int
) -> None:
    requests = coming(rows, samples)
    ledger = served(requests, limits)
    assert ledger.finished + ledger.refused == len(requests)
    for request in requests:
        if request.done_s != NOT_YET:
            assert request.arrival_s <= request.first_scheduled_s < request.first_token_s <= request.done_s


@given(rows=ROWS, limits=LIMITS)
@settings(max_examples=200, deadline=None)
def test_the_recorder_has_all_of_it(rows: list[tuple[int, int, int, int, bool]], limits: Limits) -> None:
    requests = coming(rows)
    ledger = served(requests, limits)
    metrics, line, everything = ledger.metrics, ledger.metrics.timeline, slice(None)
    column = dict(zip(REQUEST_COLUMNS, metrics.requests().T, strict=True))
    done = [request for request in requests if request.done_s != NOT_YET]
    assert [int(index) for index in column["index"]] == [request.index for request in done]
    assert len(metrics.rejections) == ledger.refused
    assert metrics.preemptions == ledger.preempted == column["preemptions"].sum()
    if not done:
        return
    made, prompts = column["output_tokens"].sum(), column["prompt_tokens"].sum()
    between = float((column["done_s"] - column["first_token_s"]).sum())
    assert np.isclose(line.sum_of("gaps", everything), made - len(done))
    assert np.isclose(line.sum_of("gap_s", everything), between)
    assert np.isclose(line.sum_of("busy_s", everything), ledger.busy_s)
    assert np.isclose(line.sum_of("tokens", everything), made)
    assert np.isclose(line.sum_of("prompt_tokens", everything), ledger.prompt_tokens)
    assert line.most_kv_blocks.max() <= limits.kv_blocks
    assert 0 <= line.sum_of("kv_block_s", everything) <= limits.kv_blocks * ledger.busy_s * (1 + 1e-9)
    assert metrics.end_s == ledger.end_s
    if not limits.prefix_caching:
        # Every token but the last has its KV computed once, and once more for each time it was thrown away.
        assert ledger.tokens == prompts + made - len(done) + metrics.recomputed_tokens
        assert column["cached_tokens"].sum() == 0


@given(rows=ROWS, limits=LIMITS)
@settings(max_examples=100, deadline=None)
def test_first_come_first_served(rows: list[tuple[int, int, int, int, bool]], limits: Limits) -> None:
    requests = coming([(gap, prompt, output, 0, shares) for gap, prompt, output, _, shares in rows])
    ledger = served(requests, limits)
    assert ledger.admitted == sorted(ledger.admitted)


@given(rows=ROWS, limits=LIMITS, more=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_more_memory_never_preempts_more_than_none(
    rows: list[tuple[int, int, int, int, bool]], limits: Limits, more: int
) -> None:
    """With room for all there is no preemption, whatever else: what was computed is what was asked."""
    whole = sum(-(-(prompt + output) // BLOCK) for _, prompt, output, _, _ in rows)
    changed = {name: getattr(limits, name) for name in limits.__slots__} | {"kv_blocks": whole + more + 2}
    ledger = served(coming(rows), Limits(**changed))
    assert ledger.preempted == ledger.metrics.recomputed_tokens == 0


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    """Also where Python hashes text with another salt."""
    script = (
        "import json, capplan; print(json.dumps(capplan.simulate('8b', gpu='l40s', request_per_s=3, "
        "requests=400, isl='uniform:50-900', osl='lognormal:mean=150,cv=1,max=900', turns=3, "
        "think_time='exponential:4', system_prompt_tokens=300, seed=5, today=None).to_dict(), "
        "sort_keys=True, default=str))"
    )
    outputs: set[Any] = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1
    assert b'"preemptions"' in outputs.pop()
