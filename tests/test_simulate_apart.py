"""Prompts on a replica of their own: what the answer says of the link, the two replicas and the money."""

import math
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.formulas.steady import Scheduling, Traffic
from capplan.sim.disaggregated import Link
from capplan.simulate_answer import Simulation
from capplan.simulate_apart import stable_request_per_s
from capplan.simulate_estimate import answer, simulate
from capplan.simulate_question import GBPS, question_of
from capplan.simulate_run import Logs

KV_BYTES = 2 * 32 * 8 * 128 * 2
"""Of a token of Llama-3.1-8B in bf16."""


def apart(gbps: float, **fields: Any) -> Simulation:
    return simulate(
        "8b", gpu="h100", price_usd_per_gpu_hour=2.0, bounds=True, kv_link_bytes_per_s=gbps * GBPS, **fields
    )


def test_one_request_takes_prompt_transfer_and_decoding() -> None:
    made = apart(10, requests=1, isl=1000, osl=11, kv_link_s=0.002)
    summary = made.summary
    assert summary.apart is not None
    assert summary.apart.transfer_s is not None
    # 1,000 tokens of 128 KiB at 1.25 GB/s are 104.9 ms, and 2 ms of latency.
    moved_s = 1000 * KV_BYTES / 1.25e9
    assert summary.apart.transfer_s.mean == pytest.approx(moved_s + 0.002)
    ttft, tpot, e2e = (summary.spreads[name] for name in ("ttft_s", "tpot_s", "e2e_s"))
    assert ttft is not None
    assert tpot is not None
    assert e2e is not None
    step_s = made.load.served.decode_step_s
    assert e2e.mean == pytest.approx(ttft.mean + moved_s + 0.002 + 10 * step_s, rel=1e-3)
    assert tpot.mean == pytest.approx((e2e.mean - ttft.mean) / 10)
    assert summary.apart.transfer_share == pytest.approx((moved_s + 0.002) / e2e.mean)
    assert summary.apart.link_busy == pytest.approx(moved_s / summary.end_s)


def test_prompts_apart_do_not_stall_those_that_decode() -> None:
    load: dict[str, Any] = {"request_per_s": 20, "requests": 600}
    made = apart(400, **load)
    one = simulate("8b", gpu="h100", price_usd_per_gpu_hour=2.0, bounds=True, **load)
    ours, theirs = made.summary.spreads["itl_s"], one.summary.spreads["itl_s"]
    assert ours is not None
    assert theirs is not None
    assert ours.p99 < theirs.p99 / 2
    assert made.summary.requests == 600
    assert made.summary.output_tokens == one.summary.output_tokens
    assert made.usd_per_hour == 2 * (one.usd_per_hour or math.nan)
    assert made.summary.kv_usage.mean > 0


def test_a_slow_link_decides() -> None:
    made = apart(5, concurrency=64, requests=400)
    found = made.to_dict()["disaggregated"]
    # 625 MB/s over 1,024 tokens of 128 KiB.
    assert found["stable_request_per_s"]["link"] == pytest.approx(625e6 / (1024 * KV_BYTES))
    assert made.load.stable_request_per_s == pytest.approx(found["stable_request_per_s"]["link"])
    assert made.summary.request_per_s == pytest.approx(made.load.stable_request_per_s, rel=0.02)
    assert found["link_busy"] > 0.95
    assert found["transfer_share"] > 0.5


@pytest.mark.parametrize("gbps", [5, 400])
def test_the_stable_rate_is_where_the_queue_begins_to_grow(gbps: float) -> None:
    most = apart(gbps, requests=50).load.stable_request_per_s
    below, above = (apart(gbps, request_per_s=most * part, requests=1500) for part in (0.85, 1.3))
    assert below.steady
    assert not above.steady
    slow, fast = (made.summary.spreads["e2e_s"] for made in (above, below))
    assert slow is not None
    assert fast is not None
    assert slow.mean > 1.5 * fast.mean
    assert any("unstable" in note for note in above.notes)


def test_the_parts_of_the_stable_rate_by_hand() -> None:
    def step_s(*, decode_sequences: float, prompt_sequences: float | None = None, **_: Any) -> float:
        return (0.01 if decode_sequences else 0.0) + 0.04 * (prompt_sequences or 0)

    found = stable_request_per_s(
        Link(bytes_per_s=1e9, latency_s=0.1, kv_bytes_per_token=1e5),
        step_s,
        Traffic(isl=1000, osl=101),
        Scheduling(max_num_seqs=8),
        100_000.0,
    )
    # 40 ms a prompt; 10⁸ bytes of 10⁹ a second; 8 sequences through 100 steps of 10 ms.
    assert found == pytest.approx({"prefill": 25, "link": 10, "decode": 8})


def test_runs_with_seeds_of_their_own_are_pooled() -> None:
    made = apart(50, request_per_s=10, requests=100, repeat=2)
    assert len(made.runs) == 2
    seen = [run.apart for run in made.runs if run.apart is not None]
    assert made.summary.apart is not None
    assert made.summary.apart.transfer_share == pytest.approx(sum(one.transfer_share for one in seen) / 2)
    assert seen[0] != seen[1]


def test_the_same_seed_is_the_same_answer_and_sessions_run() -> None:
    load: dict[str, Any] = {"concurrency": 8, "turns": "3", "think_time": "1", "requests": 60}
    first, second = (apart(50, **load).to_dict() for _ in range(2))
    assert first == second
    assert first["requests"]["finished"] == 60
    assert first["prefix_hit_rate"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "tgi"}, "with the scheduler tgi"),
        ({"scheduler": "orca"}, "with the scheduler orca"),
        ({"speculative_tokens": 3, "acceptance_rate": 0.5}, "with drafts"),
        ({"osl": 1}, "nothing decodes"),
        ({"kv_link_bytes_per_s": 0.0}, "out of range"),
        ({"kv_link_bytes_per_s": math.nan}, "out of range"),
        ({"kv_link_bytes_per_s": math.inf}, "out of range"),
        ({"kv_link_s": -1.0}, "out of range"),
        ({"kv_link_bytes_per_s": None, "kv_link_s": 1.0}, "no link"),
    ],
)
def test_what_is_not_modelled_is_refused(fields: dict[str, Any], message: str) -> None:
    asked = {"request_per_s": 2, "requests": 20, "kv_link_bytes_per_s": 1e9} | fields
    with pytest.raises(InputError, match=message):
        simulate("8b", gpu="h100", price_usd_per_gpu_hour=2.0, **asked)


def test_windows_and_two_step_logs_are_refused(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="keep a window or a state"):
        simulate("gpt-oss-20b", gpu="h100", request_per_s=2, requests=5, kv_link_bytes_per_s=1e9)
    question = question_of("8b", gpu="h100", request_per_s=2, requests=5, kv_link_bytes_per_s=1e9)
    with pytest.raises(InputError, match="two replicas in one log"):
        answer(question, files=Logs(steps=tmp_path / "steps.csv"))
    log = tmp_path / "requests.csv"
    answer(question, files=Logs(requests=log))
    assert len(log.read_text().splitlines()) == 6
