"""The answer of `capplan simulate`: against closed forms, between its own figures, and its JSON."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capplan.errors import DoesNotFitError, InputError
from capplan.latency_estimate import latency
from capplan.sim.summary import METRICS, STATISTICS
from capplan.simulate_answer import Simulation
from capplan.simulate_estimate import answer, simulate
from capplan.simulate_question import SimulateQuestion, question_of
from capplan.simulate_run import Logs, Progress
from capplan.simulate_setup import Subject

PRICE = {"price_usd_per_gpu_hour": 2.0}


def mean(made: Simulation, name: str) -> float:
    spread = made.summary.spreads[name]
    assert spread is not None
    return spread.mean


def quick(**fields: Any) -> Simulation:
    return simulate("8b", gpu="h100", **PRICE, **fields)


def question(**fields: Any) -> SimulateQuestion:
    return question_of("8b", gpu="h100", **PRICE, **fields)


@pytest.mark.parametrize(
    ("load", "closed"),
    [
        ({"request_per_s": 2, "requests": 600}, {"request_per_s": 2}),
        ({"request_per_s": 12, "requests": 2500}, {"request_per_s": 12}),
        ({"concurrency": 1, "requests": 20}, {"concurrency": 1}),
    ],
)
def test_means_are_those_of_latency(load: dict[str, Any], closed: dict[str, Any]) -> None:
    made, expected = quick(**load), latency("8b", gpu="h100", figures_alone=True, **closed)
    assert mean(made, "tpot_s") == pytest.approx(expected.tpot.estimate, rel=0.10)
    assert mean(made, "e2e_s") == pytest.approx(expected.e2e.estimate, rel=0.10)


def test_load_is_said_as_latency_says_it() -> None:
    made = quick(request_per_s=8, requests=500)
    expected = latency("8b", gpu="h100", request_per_s=8, lengths="equal")
    assert expected.served is not None
    assert made.load.offered_request_per_s == 8
    # The KV pool lacks the block that vLLM never gives out: nothing that this load notices.
    assert made.load.stable_request_per_s == pytest.approx(expected.served.stable_request_per_s, rel=1e-3)
    assert made.load.utilization == pytest.approx(expected.served.utilization, rel=1e-3)
    assert made.knee_distance == pytest.approx(1 / made.load.utilization)


def test_littles_law_holds_between_the_figures() -> None:
    """Requests under way = rate · time in the engine; running is its time average."""
    made = quick(request_per_s=12, requests=4000, warm_up_s=0.0)
    series, summary = made.summary.series, made.summary
    around_s = Subject(made.question).around_s
    running = sum(series.running) / len(series.running)
    rate = summary.requests / summary.end_s
    inside_s = mean(made, "e2e_s") - mean(made, "queue_s") - around_s
    assert running == pytest.approx(rate * inside_s, rel=0.02)


def test_tokens_are_conserved() -> None:
    summary = quick(request_per_s=10, requests=300, isl="uniform:10-500", osl="uniform:1-100").summary
    assert summary.requests == 300
    assert summary.unfinished == summary.rejected == 0
    series = summary.series
    made = sum(series.output_token_per_s[:-1]) * series.width_s
    assert made <= summary.output_tokens
    assert made == pytest.approx(summary.output_tokens, rel=0.05)


def test_same_seed_same_bytes_and_another_seed_others() -> None:
    first, second, other = (
        json.dumps(quick(request_per_s=8, requests=200, seed=seed).to_dict(), allow_nan=False)
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_json_has_the_keys_that_scripts_read() -> None:
    found = quick(request_per_s=8, requests=300, slo="chat").to_dict()
    assert found["schema"] == "capplan.simulate/1"
    for name in METRICS:
        assert set(found["metrics"][name]) == set(STATISTICS)
        assert all(0 <= value < math.inf for value in found["metrics"][name].values())
    assert set(found["kv_usage"]) == {"mean", "p95", "max", "full"}
    assert 0 < found["goodput_request_per_s"] <= found["request_per_s"]
    assert found["preemptions"] == 0
    assert found["fleet_usd"] == pytest.approx(2.0 * found["duration_s"] / 3600)
    assert found["usd_per_million_output_token"] == pytest.approx(
        2.0 / 3600 / found["output_token_per_s"] * 1e6
    )
    assert found["confidence"]["method"] == "batch means"
    assert found["provenance"] == "estimate"
    assert set(found["bands"]) == {"ttft", "tpot", "e2e", "throughput"}


def test_overload_says_so_with_the_stable_rate_and_the_queue() -> None:
    made = quick(request_per_s=100, requests=1500, max_num_seqs=64)
    assert not made.steady
    assert made.load.utilization > 1
    note = next(note for note in made.notes if note.startswith("unstable"))
    assert f"{made.load.stable_request_per_s:.3g}" in note
    assert made.summary.queue[1] > made.summary.queue[0]
    closed = made.to_dict()["load"]["closed_form"]
    assert closed["ttft_s"] is None
    assert closed["e2e_s"] is None
    # What is served in the meantime is about the stable rate.
    assert made.summary.request_per_s == pytest.approx(made.load.stable_request_per_s, rel=0.25)


def test_a_small_pool_preempts_and_computes_again() -> None:
    made = quick(requests=60, isl=200, osl=600, kv_blocks=400, max_model_len=1000)
    assert made.summary.preemptions > 0
    assert made.summary.recomputed_tokens > 0
    assert made.summary.kv_usage.max == pytest.approx(1.0, abs=0.01)
    assert 0 < made.summary.kv_usage.full <= 1


def test_a_shared_prefix_is_found_in_the_cache_unless_that_is_off() -> None:
    load: dict[str, Any] = {"request_per_s": 8, "requests": 200, "isl": 1024, "prefix_shared": 512}
    with_cache, without = quick(**load), quick(**load, prefix_caching=False)
    assert with_cache.summary.prefix_hit_rate == pytest.approx(0.5, abs=0.01)
    assert without.summary.prefix_hit_rate == 0
    assert mean(with_cache, "ttft_s") < mean(without, "ttft_s")
    assert with_cache.summary.unfilled is None
    assert with_cache.load.stable_request_per_s > without.load.stable_request_per_s


def test_network_is_in_what_clients_see() -> None:
    near, far = (quick(request_per_s=4, requests=100, network_s=network) for network in (0.0, 0.08))
    assert mean(far, "ttft_s") - mean(near, "ttft_s") == pytest.approx(0.08)
    assert mean(far, "queue_s") == pytest.approx(mean(near, "queue_s"))


def test_users_send_their_next_request_when_the_answer_has_come_back() -> None:
    near, far = (quick(concurrency=1, requests=30, network_s=network) for network in (0.0, 1.0))
    assert far.summary.end_s - near.summary.end_s == pytest.approx(29 * 1.0, rel=0.01)


def test_several_runs_differ_and_give_an_interval() -> None:
    made = quick(request_per_s=8, requests=150, repeat=3)
    assert len(made.runs) == 3
    ends = {run.end_s for run in made.runs}
    assert len(ends) == 3
    found = made.to_dict()
    assert found["confidence"]["method"] == "replications"
    assert found["confidence"]["half_width"]["ttft_s"]["p99"] > 0
    assert found["requests"]["finished"] == 450
    singles = [quick(request_per_s=8, requests=150, seed=seed) for seed in range(3)]
    assert [single.summary.end_s for single in singles] == [run.end_s for run in made.runs]
    assert mean(made, "e2e_s") == pytest.approx(sum(mean(single, "e2e_s") for single in singles) / 3)


def test_bounds_are_below_estimates() -> None:
    bound, estimate = (quick(request_per_s=4, requests=100, bounds=bounds) for bounds in (True, False))
    assert mean(bound, "e2e_s") < mean(estimate, "e2e_s")
    assert bound.to_dict()["provenance"] == "bound"
    assert bound.to_dict()["bands"] == {}


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "tgi", "llama.cpp"])
def test_every_engine_serves_by_its_own_scheduler(engine: str) -> None:
    made = simulate("8b", gpu="h100", engine=engine, concurrency=4, requests=40, **PRICE)
    assert made.policy.engine == engine
    assert made.summary.requests == 40
    assert any("unverified" in note for note in made.notes)


@pytest.mark.parametrize("scheduler", ["static", "orca", "hf_generate"])
def test_schedulers_of_the_past_run_on_the_same_steps(scheduler: str) -> None:
    load: dict[str, Any] = {"requests": 60, "osl": "uniform:20-600", "max_num_seqs": 8}
    now, then = quick(**load), quick(**load, scheduler=scheduler)
    assert then.summary.requests == 60
    assert then.summary.output_token_per_s < now.summary.output_token_per_s * 1.01
    if scheduler != "orca":
        assert then.summary.idle_slots > now.summary.idle_slots


def test_drafts_shorten_tpot_as_much_as_latency_says() -> None:
    drafts: dict[str, Any] = {"speculative_tokens": 3, "acceptance_rate": 0.7}
    without, made = (quick(request_per_s=2, requests=300, **fields) for fields in ({}, drafts))
    expected = latency("8b", gpu="h100", request_per_s=2, figures_alone=True, **drafts)
    assert mean(made, "tpot_s") == pytest.approx(expected.tpot.estimate, rel=0.1)
    assert mean(made, "tpot_s") < mean(without, "tpot_s") / 1.5
    assert made.summary.output_tokens == without.summary.output_tokens
    with pytest.raises(InputError, match="how many of the drafted"):
        quick(request_per_s=2, speculative_tokens=3)
    with pytest.raises(InputError, match="not modelled with static"):
        quick(request_per_s=2, scheduler="static", **drafts)


def test_several_answers_of_a_prompt_are_all_counted() -> None:
    one, four = (quick(request_per_s=2, requests=100, samples=samples) for samples in (1, 4))
    assert four.summary.output_tokens == 4 * one.summary.output_tokens
    assert four.summary.output_token_per_s == pytest.approx(4 * one.summary.output_token_per_s, rel=0.05)
    assert four.summary.prompt_tokens == one.summary.prompt_tokens


def test_rows_that_are_left_out_are_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,abc,10\n2,50,0\n3,100,10\n")
    with pytest.raises(InputError, match="cannot be read"):
        quick(trace=trace)
    made = quick(trace=trace, skip_bad_rows=True)
    assert made.summary.requests == 2
    assert any("2 bad rows of the trace left out; line 3" in note for note in made.notes)
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
    )
    assert any(
        "1 requests of the trace left out that had failed" in note for note in quick(trace=trace).notes
    )


def test_single_tokens_are_served_as_fast_as_the_closed_form_says() -> None:
    # Prompts share steps: alone in one, 100 tokens would take a step each.
    made = quick(requests=2000, isl=100, osl=1)
    assert made.summary.request_per_s == pytest.approx(made.load.stable_request_per_s, rel=0.1)


def test_where_the_engine_does_not_start_nothing_is_simulated() -> None:
    with pytest.raises(DoesNotFitError, match="would not start") as caught:
        simulate("8b", gpu="rtx-4090", request_per_s=1, isl="lognormal:mean=1000,cv=1.2")
    assert "--max-model-len" in caught.value.hint


def test_requests_that_never_fit_are_counted_and_end() -> None:
    made = quick(request_per_s=4, requests=100, isl="uniform:100-900", osl=10, max_model_len=500)
    summary = made.summary
    assert summary.rejected > 20
    assert summary.requests + summary.rejected == 100
    assert any("rejected" in note for note in made.notes)
    with pytest.raises(InputError, match="every request was rejected"):
        quick(request_per_s=4, requests=10, isl=1000, max_model_len=500)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no load"),
        ({"request_per_s": 1e6, "duration_s": 1e6}, "would take about"),
        ({"requests": 10**9}, "would take about"),
        ({"request_per_s": 4, "repeat": 0}, "out of range"),
        ({"request_per_s": 4, "kv_blocks": 1}, "out of range"),
        ({"request_per_s": 4, "warm_up_s": -1.0}, "out of range"),
        ({"request_per_s": 4, "network_s": math.inf}, "out of range"),
        ({"request_per_s": 4, "duration_s": 0.0}, "no request came"),
        ({"request_per_s": 4, "requests": 50, "warm_up_s": 1e6}, "leaves nothing"),
        ({"request_per_s": 4, "tp": 0}, "outside"),
        ({"request_per_s": 4, "speculative_tokens": 3}, "accepted"),
        ({"request_per_s": 4, "scheduler": "tgi"}, "is tgi's"),
        ({"request_per_s": 4, "scheduler": "fifo"}, "no scheduler"),
        ({"request_per_s": 4, "term": "spott"}, "no spott price"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    price = {} if "term" in fields else PRICE
    with pytest.raises(InputError, match=message):
        simulate("8b", gpu="h100", **price, **fields)


def test_a_trace_is_played_once_and_whole(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at * 0.25},{100 + at % 7},{20 + at % 5}\n" for at in range(200))
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    made = quick(trace=trace)
    assert made.summary.requests == made.summary.measured == 200
    assert made.load.offered_request_per_s == pytest.approx(4.0)
    assert made.limits.max_model_len == max(100 + at % 7 + 20 + at % 5 for at in range(200))
    with pytest.raises(InputError, match="same every time"):
        quick(trace=trace, repeat=2)


def test_logs_have_a_row_a_request_and_a_row_a_step(tmp_path: Path) -> None:
    files = Logs(requests=tmp_path / "requests.csv", steps=tmp_path / "steps.csv")
    asked = question(request_per_s=8, requests=60, isl="uniform:10-300", osl=30, max_model_len=300)
    logged, plain = answer(asked, files=files), answer(asked)
    requests = (tmp_path / "requests.csv").read_text().splitlines()
    steps = (tmp_path / "steps.csv").read_text().splitlines()
    assert len(requests) == 61
    assert sum(line.endswith(",1") for line in requests) == plain.summary.rejected
    assert len(steps) == plain.summary.steps + 1
    tokens = sum(int(line.rsplit(",", 1)[1]) for line in steps[1:])
    assert tokens == plain.summary.output_tokens
    for name in METRICS:
        assert mean(logged, name) == pytest.approx(mean(plain, name), rel=1e-3)


def test_logs_of_several_runs_or_in_no_folder_are_refused(tmp_path: Path) -> None:
    asked = question(request_per_s=8, requests=20)
    with pytest.raises(InputError, match="cannot be written"):
        answer(asked, files=Logs(requests=tmp_path / "none" / "x.csv"))
    with pytest.raises(InputError, match="logs of several runs"):
        answer(question(request_per_s=8, requests=20, repeat=2), files=Logs(steps=tmp_path / "x.csv"))


def test_an_interruption_leaves_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capplan.sim.metrics.ROWS", 256)
    heard: list[Progress] = []

    def told(progress: Progress) -> None:
        heard.append(progress)
        if progress.finished > 100:
            raise KeyboardInterrupt

    made = answer(question(request_per_s=8, requests=5000), told=told)
    assert made.partial
    assert 100 < made.summary.requests < 5000
    assert made.to_dict()["partial"] is True
    assert [progress.finished for progress in heard] == sorted(progress.finished for progress in heard)
    assert heard[0].requests == 5000


def test_an_interruption_of_several_runs_leaves_those_that_are_through() -> None:
    def told(progress: Progress) -> None:
        raise KeyboardInterrupt

    made = answer(question(request_per_s=8, requests=50, repeat=3), told=told)
    assert made.partial
    assert len(made.runs) == 1
    assert made.summary.requests == 50


def test_an_interruption_before_anything_was_served_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capplan.sim.metrics.ROWS", 2)

    def told(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(question(request_per_s=8, requests=50), told=told)


def test_runs_on_one_processor_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(request_per_s=8, requests=100, repeat=2)
    several = answer(asked)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert [run.end_s for run in answer(asked).runs] == [run.end_s for run in several.runs]


def test_the_queue_of_one_slot_is_that_of_m_d_1() -> None:
    """Prompts of one token, one at a time, at 70 %: W = ρ · S / (2 · (1 − ρ)) within the interval given."""
    alone = quick(concurrency=1, requests=50, isl=16, osl=1, max_num_seqs=1, bounds=True)
    service_s = mean(alone, "e2e_s")
    made = quick(
        request_per_s=0.7 / service_s, requests=40_000, isl=16, osl=1, max_num_seqs=1, bounds=True, seed=5
    )
    half = made.half_width("queue_s")
    assert half is not None
    assert abs(mean(made, "queue_s") - 0.7 * service_s / 0.6) <= 1.5 * half
    assert half < 0.1 * mean(made, "queue_s")


@pytest.mark.slow
def test_a_million_requests_take_less_than_two_gib() -> None:
    script = (
        "import resource\n"
        "from capplan.simulate_estimate import simulate\n"
        "made = simulate('8b', gpu='h100', request_per_s=20, requests=1_000_000, isl=300, osl=30,\n"
        "    price_usd_per_gpu_hour=2)\n"
        "print(made.summary.requests, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    requests, kib = map(int, done.stdout.split())
    assert requests == 1_000_000
    assert kib < 2 << 20
