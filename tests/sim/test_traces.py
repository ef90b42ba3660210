"""Traces as workloads: rate, window, copies, order; and the published facts of real ones."""

import json
import tracemalloc
from collections.abc import Hashable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim import traces
from capplan.sim.request import Request
from capplan.sim.traces import TraceWorkload
from capplan.sim.workload import WorkloadSpec, build

DATA = Path(__file__).parents[3] / "shared" / "data"
CONVERSATION, SYNTHETIC = "mooncake_conversation_first6000.jsonl", "mooncake_synthetic.jsonl"
real = pytest.mark.skipif(not DATA.exists(), reason="the shared traces are not beside this repository")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four requests, at 10, 12, 12 and 16 s: a rate of 3 in 6 s."""
    file = tmp_path / "trace.csv"
    file.write_text("timestamp,isl,osl\n10,100,5\n12,200,6\n12,300,7\n16,400,8\n")
    return file


def times(workload: TraceWorkload) -> list[float]:
    return [request.arrival_s for request in workload.arrivals()]


def prompts(workload: TraceWorkload) -> list[int]:
    return [request.prompt_tokens for request in workload.arrivals()]


def test_a_rate_scale_of_two_is_twice_the_rate(path: Path) -> None:
    assert times(TraceWorkload(path, rate_scale=2)) == [0, 1, 1, 3]


def test_a_mean_rate_is_met(path: Path) -> None:
    workload = TraceWorkload(path, request_per_s=1.5)
    assert workload.rate_scale == 3
    assert times(workload) == pytest.approx([0, 2 / 3, 2 / 3, 2])
    assert workload.count == 4


def test_limit_offset_and_duration(path: Path) -> None:
    assert prompts(TraceWorkload(path, limit=2)) == [100, 200]
    assert prompts(TraceWorkload(path, limit=9)) == [100, 200, 300, 400]
    later = TraceWorkload(path, offset_s=1.5)
    assert prompts(later) == [200, 300, 400]
    assert times(later) == [0.5, 0.5, 4.5]
    assert prompts(TraceWorkload(path, duration_s=6)) == [100, 200, 300]
    assert prompts(TraceWorkload(path, duration_s=6, rate_scale=2)) == [100, 200, 300, 400]
    with pytest.raises(InputError, match="a trace without requests"):
        times(TraceWorkload(path, offset_s=100))


def test_rows_beyond_the_limit_are_not_looked_at(path: Path) -> None:
    path.write_text(path.read_text() + "broken\n")
    assert prompts(TraceWorkload(path, limit=4)) == [100, 200, 300, 400]
    with pytest.raises(InputError, match="a row without isl, osl"):
        prompts(TraceWorkload(path, limit=5))


def test_copies_follow_a_mean_gap_apart(path: Path) -> None:
    # A copy spans 6 s, its mean gap is 2 s.
    workload = TraceWorkload(path, repeat=3)
    assert times(workload) == [0, 2, 2, 6, 8, 10, 10, 14, 16, 18, 18, 22]
    assert times(TraceWorkload(path, repeat=2, rate_scale=2)) == [0, 1, 1, 3, 4, 5, 5, 7]
    assert prompts(workload) == [100, 200, 300, 400] * 3
    assert [request.index for request in workload.arrivals()] == list(range(12))
    workload.summary()
    assert workload.count == 12
    assert prompts(TraceWorkload(path, repeat=2, limit=1)) == [100, 100]


def test_a_long_trace_is_read_again_for_its_copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [(r.index, r.arrival_s, r.prompt_tokens) for r in TraceWorkload(path, repeat=3).arrivals()]
    monkeypatch.setattr(traces, "MAX_KEPT_ROWS", 2)
    assert [(r.index, r.arrival_s, r.prompt_tokens) for r in TraceWorkload(path, repeat=3).arrivals()] == kept


def test_copies_of_blocks_are_other_blocks(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [4, 5]}\n' * 2)
    found = [request.segments for request in TraceWorkload(file, repeat=2).arrivals()]
    assert found[0] == found[1] == ((4, 512), (5, 1))
    assert found[2] == found[3] == (((1, 4), 512), ((1, 5), 1))
    halves = TraceWorkload(file, block_tokens=400)
    assert next(iter(halves.arrivals())).segments == ((4, 400), (5, 113))


def test_rows_out_of_order_are_refused_or_sorted_within_a_window(path: Path) -> None:
    path.write_text("timestamp,isl,osl\n12,1,5\n10,2,6\n16,3,7\n14,4,5\n13,5,8\n18,6,8\n")
    with pytest.raises(InputError) as caught:
        times(TraceWorkload(path))
    assert caught.value.message == "timestamp is 2 s before the row above"
    assert caught.value.where == f"{path}, line 3"
    assert "--trace-sort" in caught.value.hint
    assert prompts(TraceWorkload(path, sort_rows=2)) == [2, 1, 5, 4, 3, 6]
    # The row at 13 s stands two rows too late.
    with pytest.raises(InputError, match="before the row above"):
        times(TraceWorkload(path, sort_rows=1))
    skipping = TraceWorkload(path, skip_bad_rows=True)
    assert prompts(skipping) == [1, 3, 6]
    assert skipping.skipped == 3


@settings(max_examples=50)
@given(moments=st.lists(st.integers(0, 100), min_size=1, max_size=40), extra=st.sampled_from([0, 3, 10**4]))
def test_a_wide_window_sorts_anything(
    moments: list[int], extra: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("sort") / "t.csv"
    rows = "".join(f"{moment},{number + 1},1\n" for number, moment in enumerate(moments))
    file.write_text("arrival_s,isl,osl\n" + rows)
    found = list(TraceWorkload(file, sort_rows=len(moments) + extra).arrivals())
    assert [request.arrival_s for request in found] == sorted(moments)
    assert sorted(request.prompt_tokens for request in found) == list(range(1, len(moments) + 1))
    # Ties stay in the file's order.
    for earlier, later in pairwise(found):
        assert earlier.arrival_s < later.arrival_s or earlier.prompt_tokens < later.prompt_tokens


def test_a_time_that_is_none_does_not_disturb_sorting(path: Path) -> None:
    path.write_text("arrival_s,isl,osl\n3,1,5\nnan,2,6\n1,3,7\n2,4,5\n")
    workload = TraceWorkload(path, sort_rows=3, skip_bad_rows=True)
    assert prompts(workload) == [3, 4, 1]
    assert workload.first_skipped == "line 3: arrival_s is nan s, no time from 0 up"


def test_failed_requests_are_left_out_and_counted(path: Path) -> None:
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,API log\n6,ChatGPT,100,0,100,API log\n"
        "7,GPT-4,0,0,0,API log\n9,GPT-4,8,3,11,API log\n"
    )
    workload = TraceWorkload(path)
    assert prompts(workload) == [472, 8]
    assert (workload.failed, workload.skipped) == (2, 0)
    assert workload.summary().failed == 2
    path.write_text(path.read_text().replace("18,490", "-1,490"))
    with pytest.raises(InputError, match="Response tokens is -1"):
        prompts(TraceWorkload(path))


def test_prefix_shared_and_samples(path: Path) -> None:
    workload = build(WorkloadSpec(trace=path, prefix_shared=250, samples=3))
    assert workload.shares
    found = list(workload.arrivals())
    assert [request.segments[0][1] for request in found] == [100, 200, 250, 250]
    assert {request.samples for request in found} == {3}
    assert workload.after(found[0], 1.0) is None


def test_summary_by_hand(path: Path) -> None:
    summary = TraceWorkload(path).summary()
    assert summary.requests == 4
    assert summary.span_s == 6
    assert summary.request_per_s == 0.5
    assert summary.mean_prompt_tokens == 250
    assert summary.mean_output_tokens == 6.5
    load = TraceWorkload(path, rate_scale=3).load()
    assert (load.request_per_s, load.users, load.mean_prompt_tokens) == (1.5, None, 250)
    assert load.max_context_tokens == 408
    assert summary.max_context_tokens == 408


def test_a_trace_at_one_moment_has_no_rate_to_scale(path: Path) -> None:
    path.write_text("timestamp,isl,osl\n10,100,5\n10,100,5\n")
    with pytest.raises(InputError, match="a trace whose requests come at once"):
        TraceWorkload(path, request_per_s=2)
    assert TraceWorkload(path).load().request_per_s is None
    assert times(TraceWorkload(path, repeat=2)) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rate_scale": 0.0}, "0 is out of range"),
        ({"rate_scale": float("nan")}, "nan is out of range"),
        ({"request_per_s": float("inf")}, "inf is out of range"),
        ({"rate_scale": 2.0, "request_per_s": 2.0}, "two rates"),
        ({"trace_repeat": 0}, "0 is out of range"),
        ({"trace_limit": 0}, "0 is out of range"),
        ({"trace_limit": 3, "requests": 3}, "two limits"),
        ({"trace_offset_s": -1.0}, "-1 s is out of range"),
        ({"trace_sort_rows": -1}, "-1 is out of range"),
        ({"users": 3, "turns": "geometric:3"}, "options a trace takes the place of"),
    ],
)
def test_bad_options(path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        build(WorkloadSpec(trace=path, **options))
    assert caught.value.message.startswith(what)


def test_a_trace_with_blocks_takes_no_shared_prefix(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [4]}\n')
    with pytest.raises(InputError, match="the trace says itself what prompts share"):
        build(WorkloadSpec(trace=file, prefix_shared=2))


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    with file.open("w") as stream:
        stream.write("arrival_s,isl,osl\n")
        stream.writelines(
            f"{number / 8},{number % 4000 + 1000},{number % 900 + 300}\n" for number in range(50_000)
        )
    tracemalloc.start()
    try:
        assert sum(1 for _ in TraceWorkload(file).arrivals()) == 50_000
        assert tracemalloc.get_traced_memory()[1] < 500_000  # 50,000 rows kept would be some 8 MB
    finally:
        tracemalloc.stop()


def percentile(values: Iterable[int], share: float) -> int:
    found = sorted(values)
    return found[int(share * len(found))]


def infinite_cache_hit_rate(requests: Iterable[Request]) -> float:
    """Share of blocks found in a cache that forgets nothing, while every block before them was found."""
    seen: set[tuple[Hashable, int]] = set()
    hits = total = 0
    for request in requests:
        hit = True
        for segment in request.segments:
            hit = hit and segment in seen
            hits += hit
        seen.update(request.segments)
        total += len(request.segments)
    return hits / total


# Requests, span in s, requests a second; of prompts and outputs the mean, median, P99 and maximum.
FACTS = {
    "azure_llm_2023_conv.csv": (19_366, 3501.7, 5.53, (1154.7, 1020, 4142, 14050), (211.1, 129, 601, 1000)),
    "azure_llm_2023_code.csv": (8_819, 3435.9, 2.57, (2047.8, 1469, 7436, 7437), (27.9, 13, 252, 1899)),
    CONVERSATION: (6_000, 1872.0, 3.21, (12773.9, 7596, 91587, 123192), (347.0, 356, 1157, 2000)),
    SYNTHETIC: (3_993, 1022.0, 3.91, (15325.5, 11587, 66458, 191378), (149.1, 69, 769, 893)),
}


@real
@pytest.mark.parametrize("name", FACTS)
def test_published_facts_of_real_traces(name: str) -> None:
    requests, span_s, rate, prompt, output = FACTS[name]
    workload = TraceWorkload(DATA / "traces" / name)
    summary = workload.summary()
    found = list(workload.arrivals())
    assert workload.form.name == ("Mooncake" if name.endswith("jsonl") else "Azure LLM")
    assert len(found) == summary.requests == requests
    assert summary.span_s == pytest.approx(span_s, abs=0.06)
    assert summary.request_per_s == pytest.approx(rate, abs=0.006)
    for values, mean, (_, p50, p99, highest) in (
        ([request.prompt_tokens for request in found], summary.mean_prompt_tokens, prompt),
        ([request.output_tokens for request in found], summary.mean_output_tokens, output),
    ):
        assert mean == pytest.approx(sum(values) / requests)
        assert (percentile(values, 0.5), percentile(values, 0.99), max(values)) == (p50, p99, highest)
    assert summary.mean_prompt_tokens == pytest.approx(prompt[0], abs=0.05)
    assert summary.mean_output_tokens == pytest.approx(output[0], abs=0.05)
    assert (summary.failed, summary.skipped) == (0, 0)
    assert found[0].arrival_s == 0
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(found))


@real
@pytest.mark.parametrize(("name", "rate"), [(CONVERSATION, 0.346), (SYNTHETIC, 0.640)])
def test_prefix_hits_of_an_infinite_cache(name: str, rate: float) -> None:
    file = DATA / "traces" / name
    once = infinite_cache_hit_rate(TraceWorkload(file).arrivals())
    assert once == pytest.approx(rate, abs=0.0005)
    assert infinite_cache_hit_rate(TraceWorkload(file, repeat=2).arrivals()) == pytest.approx(once)
    for request in TraceWorkload(file, limit=500).arrivals():
        assert sum(tokens for _, tokens in request.segments) == request.prompt_tokens


@real
def test_the_first_azure_gap_keeps_seven_digits() -> None:
    first, second, *_ = TraceWorkload(DATA / "traces" / "azure_llm_2023_conv.csv", limit=3).arrivals()
    # 18:15:46.6805900 → 18:15:50.9951690
    assert second.arrival_s - first.arrival_s == pytest.approx(4.314579, abs=1e-9)


@real
@pytest.mark.parametrize("folder", ["rtx4090_llama-3.1-8b", "rtxpro6000_qwen3-32b"])
def test_logged_vllm_runs(folder: str) -> None:
    file = DATA / "vllm_runs" / folder / "requests.jsonl"
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    workload = TraceWorkload(file)
    assert workload.form.name == "vllm runs"
    found = list(workload.arrivals())
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == [
        (row["input_toks"], row["output_toks"]) for row in logged
    ]
    assert found[-1].arrival_s == logged[-1]["arrival_time"] - logged[0]["arrival_time"]
    assert workload.summary().request_per_s == pytest.approx(10, rel=4 / len(logged) ** 0.5)


@real
@pytest.mark.parametrize(
    "name", ["a_steady", "b_preempt", "c_small_budget", "g_prefix_evict", "h_block32_noreserve"]
)
def test_requests_of_scheduler_oracles_keep_their_clock(name: str) -> None:
    folder = DATA / "oracles" / "scheduler"
    limits = json.loads((folder / f"{name}.json").read_text())
    file = folder / f"{name}.requests.csv"
    workload = build(WorkloadSpec(trace=file, prefix_shared=limits["prefix"]))
    found = list(workload.arrivals())
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    assert len(found) == limits["n"]
    assert [round(request.arrival_s * 1e6) for request in found] == [int(row[1]) for row in rows]
    assert workload.shares == (limits["prefix"] > 0)
    if workload.shares:
        assert {request.segments for request in found} == {(("system prompt", limits["prefix"]),)}
